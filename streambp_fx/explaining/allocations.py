"""Count what a piece of code allocates by running it on fake tensors, which have sizes and no data.

A storage is alive from the op that makes it to the moment when the last tensor that looks at it is
dropped, as in the allocator. What an op allocates inside itself is seen for this package's own ops,
whose implementations are run in place of the functions that give their shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streambp_fx._torch import DataDependentError, TorchDispatchMode, pytree, storage_id

from ..ops import IMPLEMENTATIONS


class AllocationCounter(TorchDispatchMode):
    """Bytes alive and their peak while a with-block runs, without storages that are older.

    ``course`` has the bytes that were alive after each allocation and each free.
    """

    def __init__(self, older: list[Tensor]) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self.course: list[int] = []
        self._known: dict[int, Any] = {}
        for tensor in older:
            self._watch(tensor, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        implementation = IMPLEMENTATIONS.get(func)
        if implementation is not None:
            with self:
                try:
                    return implementation(*args, **(kwargs or {}))
                except DataDependentError:
                    # What it does depends on values, which are not there: its results alone count.
                    pass
        results = func(*args, **(kwargs or {}))
        self.include(results)
        return results

    def include(self, values: Any) -> None:
        """Count the storages of the tensors in ``values`` that are not known yet."""
        for leaf in pytree.tree_leaves(values):
            # What a deferred tensor knows of itself is on the meta device, and takes no memory.
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._watch(leaf, leaf.untyped_storage().nbytes())

    def _watch(self, tensor: Tensor, size: int) -> None:
        key = storage_id(tensor)
        if key in self._known:
            return
        self._known[key] = weakref.finalize(tensor.untyped_storage(), self._drop, key, size)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self._allocated(key, size)

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self.alive -= size
        self._freed(key)

    def _allocated(self, key: int, size: int) -> None:
        self.course.append(self.alive)

    def _freed(self, key: int) -> None:
        self.course.append(self.alive)


def peak_of(run: Callable[[], Any], older: list[Tensor]) -> int:
    """The most bytes that ``run`` has alive at a time, its results among them."""
    with torch.no_grad(), AllocationCounter(older) as counter:
        run()
    return counter.peak

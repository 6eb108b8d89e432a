"""What a deferred tensor holds in place of its elements.

Glossary
--------
recipe
    How an output is computed, fixed when the graph was compiled: a small graph and its operands.
origin
    Where the elements live. Views of one tensor share an origin, as they would share a storage.
view
    An op that only changes how elements are indexed. A deferred tensor is an origin and a chain
    of views of it, applied once the origin has its elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .operand_state import OperandState

if TYPE_CHECKING:
    from .deferred import DeferredTensor

aten = torch.ops.aten

KEEP_OUTPUTS = 'options={"keep_outputs": True}'


class DeferredOutputError(RuntimeError):
    """A deferred output was asked for something that it can not give."""


@dataclass(frozen=True)
class Recipe:
    """How one output of a compiled graph is computed.

    name
        The output's name, for messages.
    graph
        Maps the operands to the output; ``None`` for an output that can not be computed again.
    rowwise
        The graph's first operand has the output's shape up to its last dim, and each of the
        output's rows (all dims but the last) depends on the same row of it alone. A slice of the
        output can then be computed from the same slice of the operand.
    autocast
        The autocast regions inside the program that the graph's nodes are in: dtype of each
        device type, ``None`` where it is switched off.
    """

    name: str
    graph: torch.fx.GraphModule | None
    rowwise: bool = False
    autocast: Mapping[str, torch.dtype | None] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """One op of a chain of views: ``op(tensor, *args, **kwargs)``."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, tensor: Tensor) -> Tensor:
        result: Tensor = self.op(tensor, *self.args, **self.kwargs)
        return result

    def takes_rows(self, ndim: int) -> bool:
        """Whether it selects rows of a tensor with ``ndim`` dims and leaves the last dim whole."""
        if self.op not in (aten.slice.Tensor, aten.select.int):
            return False
        dim = self.args[0] if self.args else self.kwargs.get("dim", 0)
        return bool(dim % ndim != ndim - 1)


def apply_views(views: Sequence[View], tensor: Tensor) -> Tensor:
    for view in views:
        tensor = view(tensor)
    return tensor


class Origin:
    """The elements of a deferred tensor and of all views of it."""

    def __init__(self) -> None:
        self._elements: Tensor | None = None
        self.writes = 0  # in-place changes since the elements were computed

    @property
    def computed(self) -> bool:
        return self._elements is not None

    def elements(self) -> Tensor:
        """All elements, computed at the first call."""
        if self._elements is None:
            self._elements = self._compute()
            self._release()
        return self._elements

    def rows(self, views: Sequence[View]) -> Tensor | None:
        """The elements seen through ``views`` without computing the others, where that is known
        to be possible."""
        raise NotImplementedError

    def _compute(self) -> Tensor:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


class Replay(Origin):
    """Elements that a recipe computes from the operands of one call."""

    def __init__(self, recipe: Recipe, operands: Sequence[Any], device_type: str) -> None:
        super().__init__()
        self._recipe = recipe
        self._operands = tuple(operands)
        self._states = [OperandState.of(operand) for operand in operands]
        # The graph was traced in the autocast state of this call: guards see to it.
        around = (
            torch.get_autocast_dtype(device_type)
            if torch.is_autocast_enabled(device_type)
            else None
        )
        self._autocast = {device_type: around, **recipe.autocast}

    def rows(self, views: Sequence[View]) -> Tensor | None:
        if not self._recipe.rowwise or not views:
            return None
        ndim = self._operands[0].ndim
        for view in views:
            if not view.takes_rows(ndim):
                return None
            ndim -= view.op is aten.select.int
        self._check()
        return self._run(apply_views(views, self._operands[0]), *self._operands[1:])

    def _compute(self) -> Tensor:
        self._check()
        return self._run(*self._operands)

    def _release(self) -> None:
        self._operands = ()
        self._states = []

    def _run(self, *operands: Any) -> Tensor:
        if self._recipe.graph is None:
            raise RuntimeError(f"the recipe of {self._recipe.name!r} has no graph to run")
        with torch.no_grad(), ExitStack() as regions:
            for device_type, dtype in self._autocast.items():
                regions.enter_context(
                    torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
                )
            result: Tensor = self._recipe.graph(*operands)
        return result

    def _check(self) -> None:
        name = self._recipe.name
        if self._recipe.graph is None:
            raise DeferredOutputError(
                f"the output {name!r} was left out of the compiled step: keeping it would hold a "
                "tensor of the whole sequence that the loss does not need. Compile with "
                f"{KEEP_OUTPUTS} to get it at its full memory cost, or ask the model not to "
                "return it (use_cache=False for past_key_values, output_hidden_states=False for "
                "hidden_states)."
            )
        for operand, state in zip(self._operands, self._states, strict=True):
            if state is not None and not state.is_of(operand):
                raise DeferredOutputError(
                    f"the output {name!r} is computed when it is first used, and a tensor it is "
                    f"computed from (shape {tuple(operand.shape)}) has changed since: most often "
                    "the weights, in optimizer.step(). Use the output before that (for example "
                    f"clone it to another device, or reduce it), or compile with {KEEP_OUTPUTS}."
                )


class Copy(Origin):
    """Elements that are a copy (another dtype or memory format) of a deferred tensor's."""

    def __init__(self, source: DeferredTensor, copy: View) -> None:
        super().__init__()
        self._source: DeferredTensor | None = source
        self._copy = copy
        self._writes = source._origin.writes

    def rows(self, views: Sequence[View]) -> Tensor | None:
        source = self._unchanged_source()
        if source._origin.computed:
            part: Tensor | None = apply_views(views, source._materialize())
        else:
            part = source._origin.rows((*source._views, *views))
        # A slice's memory format is not the whole's, so only the dtype is converted.
        return None if part is None else part.to(_dtype_of(self._copy, part.dtype))

    def _compute(self) -> Tensor:
        return self._copy(self._unchanged_source()._materialize())

    def _release(self) -> None:
        self._source = None

    def _unchanged_source(self) -> DeferredTensor:
        if self._source is None:
            raise RuntimeError("a computed copy has no source")
        if self._source._origin.writes != self._writes:
            raise DeferredOutputError(
                "a copy of a deferred output is computed when it is first used, and the output "
                "was changed in place since: use the copy before the change, or compile with "
                f"{KEEP_OUTPUTS}."
            )
        return self._source


def _dtype_of(copy: View, default: torch.dtype) -> torch.dtype:
    """The dtype of a copy made by ``copy`` from a tensor of dtype ``default``."""
    dtype: torch.dtype | None = copy.kwargs.get("dtype")
    return default if dtype is None else dtype

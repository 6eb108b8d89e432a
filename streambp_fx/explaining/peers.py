"""What a step of a program would take at its peak without this backend.

Each way is run on fake tensors, with every allocation counted: eager, gradient checkpointing as
Hugging Face models have it, and ``torch.compile``, whose kernels do nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from streambp_fx._torch import FakeTensorMode, GraphLowering, ShapeEnv, inductor_config, pytree

from ..passes.lower_only import NOT_NEEDED, without_compiling
from .allocations import AllocationCounter
from .body_memory import without_kernels
from .loss import loss_of
from .trace import tensors_of, with_own_cache, without_data

EAGER, CHECKPOINTING, COMPILED = "eager", "gradient checkpointing", "torch.compile"


@dataclass(frozen=True)
class PeerMemory:
    """Peak bytes of one step, and the bytes alive after each of its allocations and frees."""

    peak: int
    course: tuple[int, ...]


def peer_memory(
    way: str, program: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> PeerMemory | None:
    """The memory of one step above its start, with the parameters' gradients allocated.

    Args:
        way: one of `EAGER`, `CHECKPOINTING`, `COMPILED`.
        program, args, kwargs: as of `explain`.

    Returns:
        ``None`` where no module of the program has gradient checkpointing to switch on.

    Raises:
        NoLossError: gradients are on, and the program returns no scalar to differentiate.
    """
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        program, args, kwargs = without_data((program, tuple(args), dict(kwargs)))
        tree = (program, args, kwargs)
        modules = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, nn.Module)]
        tensors = tensors_of(tree)
        for tensor in list(tensors):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.grad = torch.zeros_like(tensor)
                tensors.append(tensor.grad)
        if way == CHECKPOINTING and not switch_on_checkpointing(modules):
            return None
        counter = AllocationCounter(tensors)
        if way != COMPILED:
            # Positions that are given may be those of packed rows.
            known = nullcontext() if "position_ids" in kwargs else rows_not_packed()
            with known, counter:
                _step(program, args, kwargs)
            return PeerMemory(counter.peak, tuple(counter.course))
        compiled = torch.compile(with_own_cache(program), dynamic=False)
        with _lowered_only(counter):
            _step(compiled, args, kwargs)
            counter.peak = 0
            counter.course.clear()
            _step(compiled, args, kwargs)
        return PeerMemory(counter.peak, tuple(counter.course))


def rows_not_packed() -> AbstractContextManager[Any]:
    """Let transformers know, where it is used, that no row holds several sequences.

    It reads that from the positions' values, and on tensors without data it supposes that rows are
    packed and builds a mask of all pairs of tokens that a real step does not have.
    """
    masks = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masks is None or not hasattr(masks, name):
        return nullcontext()
    return patch.object(masks, name, lambda position_ids: None)


def _step(program: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    loss = loss_of(program(*args, **kwargs))
    if loss is not None:
        loss.backward()


def switch_on_checkpointing(modules: Sequence[nn.Module]) -> bool:
    """Switch on Hugging Face's gradient checkpointing; false where no module has it."""
    switched = False
    for module in modules:
        enable = getattr(module, "gradient_checkpointing_enable", None)
        if enable is None:
            continue
        config: Any = getattr(module, "config", None)
        if config is not None:
            config.use_cache = False  # transformers does so itself, with a warning
        with warnings.catch_warnings():
            # The method has a new name in newer transformers, which older ones lack.
            warnings.simplefilter("ignore", FutureWarning)
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        switched = True
    return switched


@contextmanager
def _lowered_only(counter: AllocationCounter) -> Iterator[None]:
    """Have Inductor write no kernels, and ``counter`` see what its code allocates.

    The counter is on inside of compiled code alone: Dynamo does not run compiled code under modes.
    """

    def counting(graph: GraphLowering, source: str) -> Callable[[list[Any]], Any]:
        call = without_kernels(source)

        def counted(inputs: list[Any]) -> Any:
            # Autograd makes a zero gradient for each output that none is given for.
            counter.include(inputs)
            with torch.no_grad(), counter:
                return call(inputs)

        return counted

    with without_compiling(counting), inductor_config.patch(NOT_NEEDED):
        yield

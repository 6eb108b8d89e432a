"""Ops that work along one or some dims and leave the others alone: softmax, cumsum, sort, flip.

All tensors have the same rank. The dims that are worked along are `whole`; a dim there that the
outputs have in another size (``topk``) has letters of its own in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .arguments import argument, has_argument, overloads
from .letters import Letters, letters_in, shape_of, wrap_dim, wrap_dims
from .registry import register_rule
from .sizes import same_size
from .spec import Call, Dims, Letter, Spec

aten = torch.ops.aten
prims = torch.ops.prims

_ALONG_DIM = (
    *("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"),
    *("_softmax_backward_data", "_log_softmax_backward_data"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("sort", "argsort", "topk"),
)
# Left out on purpose: carrying a scan's last value into the next chunk (cumsum, cummax). That is
# a loop with state and no rule for independent chunks; along other dims scans are local here.
_ALONG_DIMS = ("flip", "roll")
_ALONG_MATRIX = ("tril", "triu")


def along_spec(call: Call, dims: Iterable[int]) -> Spec | None:
    """The spec of an op that mixes positions of ``dims`` alone.

    Returns ``None`` if ranks differ, or sizes of a dim that is not worked along.
    """
    source = call.tensors[0]
    mixed = set(dims)
    letters = Letters()
    base = letters.each("d", source.shape)
    whole: set[Letter] = set()

    def dims_of(tensor: torch.Tensor, name: str) -> Dims | None:
        if tensor.dim() != source.dim():
            return None
        found: list[tuple[Letter, ...]] = []
        for dim, size in enumerate(shape_of(tensor)):
            if same_size(size, source.shape[dim]):
                found.append(base[dim])
            elif dim in mixed:
                found.append(letters.one(f"{name}{dim}", size))
                whole.update(found[-1])
            else:
                return None
        return tuple(found)

    inputs: list[Dims] = []
    for tensor in call.tensors:
        own = dims_of(tensor, "in")
        if own is None:
            return None
        inputs.append(own)
    outputs: list[Dims | None] = []
    for output in call.outputs:
        own = None if output is None else dims_of(output, "out")
        if output is not None and own is None:
            return None
        outputs.append(own)
    whole |= letters_in(tuple(own for dim, own in enumerate(base) if dim in mixed))
    return Spec(tuple(inputs), tuple(outputs), letters.sizes, whole=frozenset(whole))


def _along(dims_of: Callable[[Call, int], Iterable[int]]) -> Callable[[Call], Spec | None]:
    def rule(call: Call) -> Spec | None:
        return along_spec(call, dims_of(call, call.tensors[0].dim()))

    return rule


def _one_dim(call: Call, ndim: int) -> tuple[int, ...]:
    if not has_argument(call, "dim"):
        return wrap_dims(None, ndim)
    return (wrap_dim(argument(call, "dim"), ndim),)


def _many_dims(call: Call, ndim: int) -> tuple[int, ...]:
    # flip of no dims is the identity; roll of no dims rolls the flattened tensor.
    dims = argument(call, "dims")
    if not dims and call.target is not aten.roll.default:
        return ()
    return wrap_dims(dims, ndim)


def _matrix_dims(call: Call, ndim: int) -> tuple[int, ...]:
    return tuple(range(max(ndim - 2, 0), ndim))


register_rule(*overloads(aten, *_ALONG_DIM))(_along(_one_dim))
register_rule(*overloads(aten, *_ALONG_DIMS), prims.rev.default)(_along(_many_dims))
register_rule(*overloads(aten, *_ALONG_MATRIX))(_along(_matrix_dims))

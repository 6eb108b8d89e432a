"""Ops that take, join or place parts along one dim: the other dims are local.

Along the dim itself, a chunk of the result needs another range of the input than its own, so the
dim's letters are `whole`, and input and output have different ones. (Slices and pads along the
streamed axis are handled before this table is asked, where the ranges are known.) A slice or pad
that keeps everything is the identity and local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import argument, overloads
from .letters import Letters, letters_in, shape_of, wrap_dim
from .registry import register_rule
from .sizes import same_size
from .spec import Call, Chunk, Dims, Letter, Size, Spec

aten = torch.ops.aten

# The end of a slice that reaches the end of its dim, whatever its size.
_TO_THE_END = 9223372036854775807


def _all_of_the_dim(
    output_shapes: Sequence[tuple[Size, ...] | None], chunk: Chunk
) -> dict[str, Any]:
    """The bounds of a slice that keeps everything: -T starts the whole, and not the chunk."""
    return {"start": 0, "end": _TO_THE_END}


class _OneDim:
    """Builds specs in which all tensors share their letters except along one dim."""

    def __init__(self, shape: Sequence[Size], dim: int) -> None:
        self.letters = Letters()
        self.dim = dim
        self.dims = self.letters.each("d", shape)
        self.whole: set[Letter] = set(letters_in(self.dims[dim : dim + 1]))

    def with_size(self, name: str, size: Size) -> Dims:
        """The letters of a tensor that has ``size`` positions along the dim, not shared."""
        own = self.letters.one(name, size)
        self.whole.update(own)
        return (*self.dims[: self.dim], own, *self.dims[self.dim + 1 :])

    def without(self) -> Dims:
        """The letters of a tensor that lacks the dim."""
        return (*self.dims[: self.dim], *self.dims[self.dim + 1 :])

    def spec(self, inputs: Sequence[Dims], outputs: Sequence[Dims | None]) -> Spec:
        return Spec(tuple(inputs), tuple(outputs), self.letters.sizes, whole=frozenset(self.whole))


@register_rule(aten.slice.Tensor)
def slice_spec(call: Call) -> Spec | None:
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    dim = wrap_dim(argument(call, "dim"), source.dim())
    if argument(call, "step") == 1 and same_size(source.shape[dim], output.shape[dim]):
        letters = Letters()
        dims = letters.each("d", source.shape)
        return Spec((dims,), (dims,), letters.sizes, resize=_all_of_the_dim)
    one = _OneDim(source.shape, dim)
    return one.spec([one.dims], [one.with_size("out", output.shape[dim])])


@register_rule(aten.select.int)
def select_spec(call: Call) -> Spec | None:
    (source,) = call.tensors
    one = _OneDim(source.shape, wrap_dim(argument(call, "dim"), source.dim()))
    return one.spec([one.dims], [one.without()])


@register_rule(aten.split.Tensor, *overloads(aten, "split_with_sizes", "unsafe_split", "chunk"))
def split_spec(call: Call) -> Spec | None:
    (source,) = call.tensors
    dim = wrap_dim(argument(call, "dim"), source.dim())
    one = _OneDim(source.shape, dim)
    outputs = [
        None if output is None else one.with_size(f"out{index}", output.shape[dim])
        for index, output in enumerate(call.outputs)
    ]
    return one.spec([one.dims], outputs)


@register_rule(aten.unbind.int)
def unbind_spec(call: Call) -> Spec | None:
    (source,) = call.tensors
    one = _OneDim(source.shape, wrap_dim(argument(call, "dim"), source.dim()))
    return one.spec([one.dims], [one.without() for _ in call.outputs])


@register_rule(aten.cat.default)
def cat_spec(call: Call) -> Spec | None:
    """Parts of one size are places of an outer factor: rows that a program stacked one by one.

    Returns ``None`` for the legacy form that skips empty tensors of another rank.
    """
    (output,) = call.outputs
    if output is None or any(tensor.dim() != output.dim() for tensor in call.tensors):
        return None
    dim = wrap_dim(argument(call, "dim"), output.dim())
    size = call.tensors[0].shape[dim]
    if all(same_size(tensor.shape[dim], size) for tensor in call.tensors):
        letters = Letters()
        part = letters.each("d", call.tensors[0].shape)
        parts = letters.one("parts", len(call.tensors))
        joined = (*part[:dim], (*parts, *part[dim]), *part[dim + 1 :])
        whole = frozenset(parts)
        return Spec((part,) * len(call.tensors), (joined,), letters.sizes, whole=whole)
    one = _OneDim(output.shape, dim)
    inputs = [
        one.with_size(f"in{index}", tensor.shape[dim]) for index, tensor in enumerate(call.tensors)
    ]
    return one.spec(inputs, [one.dims])


@register_rule(aten.stack.default)
def stack_spec(call: Call) -> Spec | None:
    (output,) = call.outputs
    if output is None:
        return None
    one = _OneDim(output.shape, wrap_dim(argument(call, "dim"), output.dim()))
    return one.spec([one.without() for _ in call.tensors], [one.dims])


@register_rule(aten.slice_scatter.default)
def slice_scatter_spec(call: Call) -> Spec | None:
    """Along the dim, ``src`` has its own letter unless it covers all of the base."""
    base, source = call.tensors
    dim = wrap_dim(argument(call, "dim"), base.dim())
    if argument(call, "step") == 1 and same_size(base.shape[dim], source.shape[dim]):
        letters = Letters()
        dims = letters.each("d", base.shape)
        return Spec((dims, dims), (dims,), letters.sizes, resize=_all_of_the_dim)
    one = _OneDim(base.shape, dim)
    return one.spec([one.dims, one.with_size("src", source.shape[dim])], [one.dims])


@register_rule(aten.select_scatter.default)
def select_scatter_spec(call: Call) -> Spec | None:
    base = call.tensors[0]
    one = _OneDim(base.shape, wrap_dim(argument(call, "dim"), base.dim()))
    return one.spec([one.dims, one.without()], [one.dims])


@register_rule(aten.constant_pad_nd.default)
def constant_pad_nd_spec(call: Call) -> Spec | None:
    """Dims that are padded by ``(0, 0)`` are local."""
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    pad = list(argument(call, "pad"))
    letters = Letters()
    dims = letters.each("d", source.shape)
    padded = list(dims)
    whole: set[Letter] = set()
    for index in range(len(pad) // 2):
        if same_size(pad[2 * index], 0) and same_size(pad[2 * index + 1], 0):
            continue
        # `pad` starts with the last dim.
        dim = source.dim() - 1 - index
        padded[dim] = letters.one(f"out{dim}", output.shape[dim])
        whole.update(dims[dim], padded[dim])
    return Spec((dims,), (tuple(padded),), letters.sizes, whole=frozenset(whole))


@register_rule(aten.unfold.default)
def unfold_spec(call: Call) -> Spec | None:
    """Windows over one dim: the number of windows takes its place, their size comes last."""
    (source,), (output,) = call.tensors, call.outputs
    if output is None or source.dim() == 0:
        return None
    dim = wrap_dim(argument(call, "dimension"), source.dim())
    one = _OneDim(source.shape, dim)
    windows = one.with_size("windows", output.shape[dim])
    size = one.letters.one("size", output.shape[-1])
    one.whole.update(size)
    return one.spec([one.dims], [(*windows, size)])


@register_rule(aten.diagonal.default)
def diagonal_spec(call: Call) -> Spec | None:
    """Both matrix dims are mixed into the last one of the output; the others are local."""
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    pair = {
        wrap_dim(argument(call, "dim1"), source.dim()),
        wrap_dim(argument(call, "dim2"), source.dim()),
    }
    letters = Letters()
    dims = letters.each("d", source.shape)
    last = letters.one("diagonal", shape_of(output)[-1])
    outputs = (*(own for index, own in enumerate(dims) if index not in pair), last)
    whole = letters_in((last,), tuple(dims[index] for index in pair))
    return Spec((dims,), (outputs,), letters.sizes, whole=whole)

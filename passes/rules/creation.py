"""Ops that make a tensor from sizes: every letter is local, and the sizes are rewritten.

Left out: rand, randn, randint, randperm (random numbers become a counter hash before the table
is asked), linspace and logspace (their step depends on the whole length), eye.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import argument
from .letters import Letters, letters_in, shape_of
from .registry import register_rule
from .sizes import product, same_size
from .spec import Call, Chunk, Dims, Letter, Size, Spec, output_size

aten = torch.ops.aten
prims = torch.ops.prims


@register_rule(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
def full_spec(call: Call) -> Spec | None:
    (output,) = call.outputs
    if output is None:
        return None
    letters = Letters()
    dims = letters.each("d", output.shape)
    return Spec((), (dims,), letters.sizes, resize=output_size("size"))


@register_rule(aten.scalar_tensor.default)
def scalar_tensor_spec(call: Call) -> Spec | None:
    return Spec((), ((),), {})


@register_rule(
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default
)
def new_full_spec(call: Call) -> Spec | None:
    """The input gives dtype and device alone, so any of its dims may be chunked or not.

    A dim of the input that has an output dim's size shares its letter, so that a chunk may make
    the chunk; the others are `whole`, since a `Spec` has no word for "never read".
    """
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    letters = Letters()
    dims = letters.each("d", output.shape)
    inputs, whole = _unread(letters, shape_of(source), shape_of(output), dims)
    return Spec((inputs,), (dims,), letters.sizes, whole=whole, resize=output_size("size"))


@register_rule(aten.new_empty_strided.default)
def new_empty_strided_spec(call: Call) -> Spec | None:
    """As ``new_empty``; a chunk keeps the order of the dims in memory, without holes.

    Returns ``None`` for strides that are not those of a dense, permuted tensor.
    """
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    order = _dense_order(shape_of(output), argument(call, "stride"))
    if order is None:
        return None
    letters = Letters()
    dims = letters.each("d", output.shape)
    inputs, whole = _unread(letters, shape_of(source), shape_of(output), dims)

    def resize(output_shapes: Sequence[tuple[Size, ...] | None], chunk: Chunk) -> dict[str, Any]:
        shape = list(output_shapes[0] or ())
        strides: list[Size] = [1] * len(shape)
        for place, dim in enumerate(order):
            strides[dim] = product(shape[inner] for inner in order[:place])
        return {"size": shape, "stride": strides}

    return Spec((inputs,), (dims,), letters.sizes, whole=whole, resize=resize)


def _unread(
    letters: Letters, source: Sequence[Size], output: Sequence[Size], dims: Dims
) -> tuple[Dims, frozenset[Letter]]:
    """Letters for an input whose values are not read: those of equal output dims, in order."""
    free = list(range(len(output)))
    found: list[tuple[Letter, ...]] = []
    own: list[tuple[Letter, ...]] = []
    for index, size in enumerate(source):
        match = next((dim for dim in free if same_size(output[dim], size)), None)
        if match is None:
            own.append(letters.one(f"in{index}", size))
            found.append(own[-1])
        else:
            free = [dim for dim in free if dim > match]
            found.append(dims[match])
    return tuple(found), letters_in(tuple(own))


def _dense_order(shape: Sequence[Size], strides: Sequence[Size]) -> list[int] | None:
    """The dims from the innermost outwards if the strides leave no hole, else ``None``."""
    left = [dim for dim, size in enumerate(shape) if not same_size(size, 1)]
    order: list[int] = []
    expected: Size = 1
    while left:
        inner = next((dim for dim in left if same_size(strides[dim], expected)), None)
        if inner is None:
            return None
        order.append(inner)
        left.remove(inner)
        expected = expected * shape[inner]
    ones = [dim for dim in range(len(shape)) if dim not in order]
    return [*order, *reversed(ones)]


@register_rule(prims.iota.default)
def iota_spec(call: Call) -> Spec | None:
    """A chunk starts at its own offset: ``start + step * chunk.start``."""
    letters = Letters()
    dims = (letters.one("i", argument(call, "length")),)
    start, step = argument(call, "start"), argument(call, "step")

    def resize(output_shapes: Sequence[tuple[Size, ...] | None], chunk: Chunk) -> dict[str, Any]:
        return {"length": chunk.length, "start": start + step * chunk.start}

    return Spec((), (dims,), letters.sizes, resize=resize, positional=True)


@register_rule(aten.arange.start_step, aten.arange.start)
def arange_spec(call: Call) -> Spec | None:
    """Integer ranges. (``arange.default`` has no start to move; it decomposes into ``iota``.)

    Returns ``None`` for floating-point steps, whose rounding decides on the length.
    """
    (output,) = call.outputs
    start = argument(call, "start")
    step = argument(call, "step") if call.target is aten.arange.start_step else 1
    if output is None or any(isinstance(bound, float) for bound in (*call.args, start, step)):
        return None
    letters = Letters()
    dims = (letters.one("i", output.shape[0]),)

    def resize(output_shapes: Sequence[tuple[Size, ...] | None], chunk: Chunk) -> dict[str, Any]:
        first = start + step * chunk.start
        return {"start": first, "end": first + step * chunk.length}

    return Spec((), (dims,), letters.sizes, resize=resize, positional=True)

"""Elements of tensors that other elements are moved into, and of tensors made from nothing.

Each handler answers: the element of this node at ``index`` is which element of its source? What
it can not express (a merge of two symbolic dims, a negative start of a symbolic dim) it declines
with None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from streambp_fx._torch import inductor_prims as _fills_torch_ops_prims  # noqa: F401

from .mask_algebra import (
    Atom,
    Formula,
    Linear,
    at_least_zero,
    conjunction,
    floor_divide,
)
from .mask_handlers import (
    Index,
    Table,
    argument,
    arguments,
    constant_element,
    handles,
)
from .mask_values import (
    Value,
    always,
    fits,
    selected,
)

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

aten = torch.ops.aten
prims = torch.ops.prims

HANDLERS: Table = {}


@handles(
    HANDLERS,
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def _reshape(interp: Interpreter, node: Node, index: Index) -> Value | None:
    source = arguments(node)[0]
    moved = reshaped_index(index, interp.sizes(node), interp.sizes(source), node)
    return interp.value(source, moved)


def reshaped_index(
    index: Index, sizes: Sequence[Linear], source_sizes: Sequence[Linear], owner: Node
) -> Index:
    """The source's index of the element at ``index``, in the same row-major order.

    Equal leading and trailing dims keep their index. Between them, the flat position is split by
    constant strides; a dim of which that can not be said gets an atom of its own.
    """
    outer = [d for d, size in enumerate(sizes) if not size.is_value(1)]
    inner = [d for d, size in enumerate(source_sizes) if not size.is_value(1)]
    moved = [Linear.of(0)] * len(source_sizes)
    while outer and inner and sizes[outer[0]] == source_sizes[inner[0]]:
        moved[inner.pop(0)] = index[outer.pop(0)]
    while outer and inner and sizes[outer[-1]] == source_sizes[inner[-1]]:
        moved[inner.pop()] = index[outer.pop()]
    strides = _constant_strides([sizes[d] for d in outer])
    source_strides = _constant_strides([source_sizes[d] for d in inner])
    if strides is None or source_strides is None:
        part = tuple(index[d] for d in outer)
        for d in inner:
            atom = Atom(("unflatten", owner, d, part), low=0, high=source_sizes[d] - 1)
            moved[d] = Linear.of(atom)
        return tuple(moved)
    flat = sum((index[d] * s for d, s in zip(outer, strides, strict=True)), start=Linear.of(0))
    for d, stride in zip(inner, source_strides, strict=True):
        position = floor_divide(flat, stride)
        moved[d] = position
        flat = flat - position * stride
    return tuple(moved)


def _constant_strides(sizes: Sequence[Linear]) -> list[int] | None:
    """Row-major strides; None where one depends on a symbolic size or the tensor is empty."""
    trailing = sizes[1:]
    if not all(size.is_constant and size.const > 0 for size in trailing):
        return None
    return [math.prod(size.const for size in sizes[d + 1 :]) for d in range(len(sizes))]


@handles(
    HANDLERS,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    prims.device_put.default,
)
def _same(interp: Interpreter, node: Node, index: Index) -> Value | None:
    return interp.value(arguments(node)[0], index)


@handles(HANDLERS, aten.expand.default)
def _expand(interp: Interpreter, node: Node, index: Index) -> Value | None:
    moved = interp.broadcast(arguments(node)[0], node, index)
    return None if moved is None else interp.value(arguments(node)[0], moved)


@handles(HANDLERS, aten.permute.default)
def _permute(interp: Interpreter, node: Node, index: Index) -> Value | None:
    moved = list(index)
    for position, dim in enumerate(arguments(node)[1]):
        moved[dim % len(index)] = index[position]
    return interp.value(arguments(node)[0], tuple(moved))


@handles(HANDLERS, aten.transpose.int)
def _transpose(interp: Interpreter, node: Node, index: Index) -> Value | None:
    source, first, second = arguments(node)
    moved = list(index)
    moved[first], moved[second] = index[second], index[first]
    return interp.value(source, tuple(moved))


@handles(HANDLERS, aten.flip.default)
def _flip(interp: Interpreter, node: Node, index: Index) -> Value | None:
    moved, sizes = list(index), interp.sizes(node)
    for dim in arguments(node)[1]:
        moved[dim] = sizes[dim] - 1 - index[dim]
    return interp.value(arguments(node)[0], tuple(moved))


def _from_front(interp: Interpreter, position: Any, size: Linear) -> Linear | None:
    """A position that may count from the end, as one that counts from the front."""
    place = interp.size(position)
    if interp.never_negative(place):
        return place
    if interp.never_negative(-place - 1) and interp.never_negative(place + size):
        return place + size
    return None


@handles(HANDLERS, aten.slice.Tensor)
def _slice(interp: Interpreter, node: Node, index: Index) -> Value | None:
    source, dim = arguments(node)[0], argument(node, 1, "dim", 0)
    begin, step = argument(node, 2, "start"), argument(node, 4, "step", 1)
    start = _from_front(interp, 0 if begin is None else begin, interp.sizes(source)[dim])
    if start is None or not isinstance(step, int):
        return None
    moved = list(index)
    moved[dim] = start + index[dim] * step
    return interp.value(source, tuple(moved))


@handles(HANDLERS, aten.select.int)
def _select(interp: Interpreter, node: Node, index: Index) -> Value | None:
    source, dim, position = arguments(node)
    sizes = interp.sizes(source)
    place = _from_front(interp, position, sizes[dim])
    if place is None:
        return None
    dim %= len(sizes)
    return interp.value(source, (*index[:dim], place, *index[dim:]))


@handles(HANDLERS, aten.slice_scatter.default, aten.select_scatter.default)
def _scatter(interp: Interpreter, node: Node, index: Index) -> Value | None:
    base, piece, dim = (
        arguments(node)[0],
        arguments(node)[1],
        argument(node, 2, "dim", 0) % len(index),
    )
    size = interp.sizes(base)[dim]
    is_slice = node.target is aten.slice_scatter.default
    if is_slice and argument(node, 5, "step", 1) != 1:
        return None
    begin = argument(node, 3, "start" if is_slice else "index")
    start = _from_front(interp, 0 if begin is None else begin, size)
    if start is None:
        return None
    offset = index[dim] - start
    if is_slice:
        length = interp.sizes(piece)[dim]
        inside = _within(offset, length)
        part = interp.value(piece, (*index[:dim], offset, *index[dim + 1 :]))
    else:
        inside = _within(offset, Linear.of(1))
        part = interp.value(piece, (*index[:dim], *index[dim + 1 :]))
    return selected(inside, part, interp.value(base, index))


def _within(offset: Linear, length: Linear) -> Formula:
    return conjunction([at_least_zero(offset), at_least_zero(length - 1 - offset)])


@handles(HANDLERS, aten.cat.default)
def _cat(interp: Interpreter, node: Node, index: Index) -> Value | None:
    tensors, dim = arguments(node)[0], argument(node, 1, "dim", 0) % len(index)
    if any(len(interp.sizes(tensor)) != len(index) for tensor in tensors):
        return None
    place = index[dim]
    pieces: list[tuple[Linear, Value]] = []
    for tensor in tensors:
        if tensor.meta["val"].dtype != node.meta["val"].dtype:
            return None
        length = interp.sizes(tensor)[dim]
        pieces.append((length, interp.value(tensor, (*index[:dim], place, *index[dim + 1 :]))))
        place = place - length
    result: Value | None = pieces[-1][1]
    position = index[dim]
    starts = []
    for length, _ in pieces[:-1]:
        starts.append(position)
        position = position - length
    for start, (length, value) in reversed(list(zip(starts, pieces[:-1], strict=True))):
        if result is None:
            return None
        result = selected(at_least_zero(length - 1 - start), value, result)
    return result


@handles(HANDLERS, aten.constant_pad_nd.default)
def _pad(interp: Interpreter, node: Node, index: Index) -> Value | None:
    source, pads = arguments(node)[0], arguments(node)[1]
    fill = constant_element(argument(node, 2, "value", 0), node.meta["val"].dtype)
    if fill is None:
        return None
    moved, sizes = list(index), interp.sizes(source)
    inside = []
    for pair in range(len(pads) // 2):
        dim = len(index) - 1 - pair
        moved[dim] = index[dim] - interp.size(pads[2 * pair])
        inside.append(_within(moved[dim], sizes[dim]))
    return selected(conjunction(inside), interp.value(source, tuple(moved)), fill)


@handles(HANDLERS, aten.index.Tensor, aten._unsafe_index.Tensor)
def _gather(interp: Interpreter, node: Node, index: Index) -> Value | None:
    source, indices = arguments(node)[0], list(arguments(node)[1])
    indices += [None] * (len(interp.sizes(source)) - len(indices))
    indexed = [dim for dim, given in enumerate(indices) if given is not None]
    rank = max(len(interp.sizes(indices[dim])) for dim in indexed)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if adjacent else 0
    own, rest = index[first : first + rank], [*index[:first], *index[first + rank :]]
    moved: list[Linear] = []
    for given in indices:
        if given is None:
            moved.append(rest.pop(0))
            continue
        place = _gathered_place(interp, given, own, interp.sizes(node)[first : first + rank])
        if place is None or not interp.never_negative(place):
            return None
        moved.append(place)
    return interp.value(source, tuple(moved))


def _gathered_place(
    interp: Interpreter, given: Node, own: Index, out_sizes: Sequence[Linear]
) -> Linear | None:
    """The value of an index tensor, broadcast with the other index tensors."""
    if given.meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    sizes = interp.sizes(given)
    offset = len(own) - len(sizes)
    place = []
    for dim, size in enumerate(sizes):
        if not size.is_value(1) and size != out_sizes[offset + dim]:
            return None
        place.append(own[offset + dim])
    value = interp.value(given, tuple(place))
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0][1], Linear):
        return value[0][1]
    return None


@handles(HANDLERS, prims.iota.default)
def _iota(interp: Interpreter, node: Node, index: Index) -> Value | None:
    start, step = (interp.size(argument(node, 1, name)) for name in ("start", "step"))
    if not step.is_constant:
        return None
    number = start + index[0] * step.const
    return always(number) if fits(number, node.meta["val"].dtype) else None


@handles(HANDLERS, aten.arange.start_step)
def _arange(interp: Interpreter, node: Node, index: Index) -> Value | None:
    start, step = arguments(node)[0], argument(node, 2, "step", 1)
    if isinstance(start, float) or not isinstance(step, int):
        return None
    number = interp.size(start) + index[0] * step
    return always(number) if fits(number, node.meta["val"].dtype) else None


@handles(HANDLERS, aten.full.default, aten.full_like.default)
def _full(interp: Interpreter, node: Node, index: Index) -> Value | None:
    return constant_element(arguments(node)[1], node.meta["val"].dtype)


@handles(HANDLERS, aten.scalar_tensor.default)
def _scalar(interp: Interpreter, node: Node, index: Index) -> Value | None:
    return constant_element(arguments(node)[0], node.meta["val"].dtype)


@handles(HANDLERS, aten.zeros.default, aten.zeros_like.default)
def _zeros(interp: Interpreter, node: Node, index: Index) -> Value | None:
    return constant_element(0, node.meta["val"].dtype)


@handles(HANDLERS, aten.ones.default, aten.ones_like.default)
def _ones(interp: Interpreter, node: Node, index: Index) -> Value | None:
    return constant_element(1, node.meta["val"].dtype)


@handles(HANDLERS, aten.tril.default, aten.triu.default)
def _triangle(interp: Interpreter, node: Node, index: Index) -> Value | None:
    diagonal, ahead = argument(node, 1, "diagonal", 0), index[-1] - index[-2]
    is_lower = node.target is aten.tril.default
    inside = at_least_zero(-ahead + diagonal if is_lower else ahead - diagonal)
    zero = constant_element(0, node.meta["val"].dtype)
    return None if zero is None else selected(inside, interp.value(arguments(node)[0], index), zero)

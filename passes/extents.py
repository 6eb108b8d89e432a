"""Slices and pads along the streamed axis itself.

``logits[:, :-1]`` leaves the streamed axis in place but covers less of it. The op table calls a
sliced dim `whole`; here the slice becomes a change of `Extent` instead, and a chunk of the result
is the part of the operand's chunk that lies inside the new extent. Backward of a slice pads the
chunk with zeros, which widens the extent again.

Given:  ``y = slice(x, dim=1, start=0, end=T-1)`` with ``x: Streamed(1, extent=[0, T))``
Result: ``y: Streamed(1, extent=[0, T-1))``
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .placement import Extent, Streamed, value_of
from .rules.calls import constant_fill
from .rules.sizes import expr_of
from .rules.spec import Size

aten = torch.ops.aten
SLICE = aten.slice.Tensor
SLICE_SCATTER = aten.slice_scatter.default
PAD = aten.constant_pad_nd.default


@dataclass(frozen=True)
class ExtentChange:
    """A slice, pad or slice_scatter along the streamed axis.

    source
        Index, among the op's tensor inputs, of the one whose chunks are sliced or padded.
    extent
        The extent of the result.
    fill
        The value of padded positions; ``None`` for a slice.
    """

    source: int
    extent: Extent
    fill: float | None


def _as_int(size: Size) -> int | None:
    """The size as a number, if its expression is one."""
    expr = expr_of(size)
    return int(expr) if expr.is_number else None


def _bounds(node: Node, dim_size: Size) -> tuple[int, int] | None:
    """How many positions a slice drops at the start and at the end, if both are constants."""
    args = list(node.args)
    offset = 1 if node.target is SLICE_SCATTER else 0
    start = args[2 + offset] if len(args) > 2 + offset else node.kwargs.get("start")
    end = args[3 + offset] if len(args) > 3 + offset else node.kwargs.get("end")
    step = args[4 + offset] if len(args) > 4 + offset else node.kwargs.get("step", 1)
    if step != 1:
        return None
    # The result's shape knows where symbolic and negative bounds lie.
    part_node = node.args[1] if node.target is SLICE_SCATTER else node
    if not isinstance(part_node, Node):
        return None
    dim = slice_dim(node)
    dropped = _as_int(dim_size - value_of(part_node).shape[dim])
    if dropped is None or dropped < 0:
        return None
    if start is None or (isinstance(start, int) and start == 0):
        return (0, dropped)
    if isinstance(start, int) and start > 0 and start <= dropped:
        return (start, dropped - start)
    if isinstance(start, int) and start < 0 and (end is None or _is_open(end)):
        return (dropped, 0)
    if isinstance(start, int) and isinstance(end, int) and start < end < 0 and -end <= dropped:
        return (dropped + end, -end)
    if isinstance(start, Node):
        lo = _as_int(value_of(start))
        if lo is None:
            distance = _as_int(dim_size - value_of(start))
            lo = dropped if distance is not None and (end is None or _is_open(end)) else None
        if lo is not None and 0 <= lo <= dropped:
            return (lo, dropped - lo)
    return None


def _is_open(end: object) -> bool:
    return isinstance(end, int) and end >= 2**62


def slice_dim(node: Node) -> int:
    """The non-negative dim of a slice or slice_scatter."""
    position = 2 if node.target is SLICE_SCATTER else 1
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    rank = value_of(node).dim()
    return int(dim) % rank  # type: ignore[arg-type]


def extent_change(
    node: Node, places: list[Streamed | None]
) -> tuple[Streamed, ExtentChange] | None:
    """The result's position when ``node`` slices or pads the streamed axis, else ``None``.

    ``places`` are the positions of the op's tensor inputs.
    """
    if node.target is SLICE:
        place = places[0]
        if place is None or slice_dim(node) != place.dim or not _plain(place):
            return None
        source = node.args[0]
        bounds = _bounds(node, value_of(source).shape[place.dim])  # type: ignore[arg-type]
        if bounds is None or bounds == (0, 0):
            return None
        extent = Extent(place.extent.lo + bounds[0], place.extent.hi + bounds[1])
        return Streamed(place.dim, 1, 1, extent), ExtentChange(0, extent, None)
    if node.target is SLICE_SCATTER:
        place = places[1] if len(places) > 1 else None
        base = node.args[0]
        if place is None or slice_dim(node) != place.dim or not _plain(place):
            return None
        fill = constant_fill(base) if isinstance(base, Node) else None
        bounds = _bounds(node, value_of(node).shape[place.dim])
        if fill is None or bounds is None:
            return None
        extent = Extent(place.extent.lo - bounds[0], place.extent.hi - bounds[1])
        if extent.lo < 0 or extent.hi < 0:
            return None
        return Streamed(place.dim, 1, 1, extent), ExtentChange(1, extent, fill)
    if node.target is PAD:
        return _pad_change(node, places[0])
    return None


def _pad_change(node: Node, place: Streamed | None) -> tuple[Streamed, ExtentChange] | None:
    if place is None or not _plain(place):
        return None
    pads = list(node.args[1])  # type: ignore[arg-type]
    rank = value_of(node).dim()
    before_after = [(0, 0)] * rank
    for index in range(0, len(pads), 2):
        before_after[rank - 1 - index // 2] = (pads[index], pads[index + 1])
    here = before_after[place.dim]
    others = [pad for dim, pad in enumerate(before_after) if dim != place.dim]
    if any(pad != (0, 0) for pad in others) or here == (0, 0):
        return None
    if not all(isinstance(amount, int) for amount in here):
        return None
    if min(here) < 0 < max(here):
        return None
    extent = Extent(place.extent.lo - here[0], place.extent.hi - here[1])
    if extent.lo < 0 or extent.hi < 0:
        return None
    if min(here) < 0:
        # The backward of a pad takes away what was added.
        return Streamed(place.dim, 1, 1, extent), ExtentChange(0, extent, None)
    fill = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    return Streamed(place.dim, 1, 1, extent), ExtentChange(0, extent, float(fill or 0))  # type: ignore[arg-type]


def _plain(place: Streamed) -> bool:
    """Whether the streamed axis is a whole dim, not a factor of one."""
    return expr_of(place.outer) == 1 and expr_of(place.inner) == 1

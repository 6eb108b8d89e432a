"""The loop node, and the plain PyTorch interpreter that defines what it means.

A loop node prints as ``streambp_loop(body, length, *operands)`` with its body nested below. The
body is a graph over one chunk ``[s, e)``; its `LoopSpec` says how each operand is passed:

    whole    the tensor itself (weights, keys and values of the past, accumulators)
    chunk    the part ``[s, e)`` along one dim
    symbol   a size that the body's shapes depend on

and what becomes of each result: ``concat`` puts chunks together along a dim, ``sum`` is an
accumulator operand that every iteration adds to in place, cast to its dtype at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streambp_fx._torch import HigherOrderOperator

from .placement import Extent


@dataclass(frozen=True)
class Along:
    """A dim that holds the streamed axis as its middle factor; ``outer`` follows from the rest."""

    dim: int
    inner: int
    extent: Extent


@dataclass(frozen=True)
class Operand:
    """How an operand is passed: ``along`` is ``None`` for a whole tensor or a size."""

    along: Along | None = None
    mutated: bool = False


@dataclass(frozen=True)
class Result:
    """What becomes of a result: concatenated ``along`` a dim, or the sum in operand ``buffer``."""

    along: Along | None = None
    buffer: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Place:
    """Which loop of a step a loop is.

    segment
        The segment whose forward, or whose backward, it belongs to, counted from the step's input.
    phase
        Its number among the loops of that forward or backward; ``None`` of the only one.
    length
        0, or which of the further lengths of sequences it runs along.
    """

    segment: int
    backward: bool = False
    phase: int | None = None
    length: int = 0

    def __str__(self) -> str:
        """``segment3``, ``stage3_1`` of its backward, ``length1_segment3``."""
        length = f"length{self.length}_" if self.length else ""
        phase = "" if self.phase is None else f"_{self.phase}"
        return f"{length}{'stage' if self.backward else 'segment'}{self.segment}{phase}"


@dataclass(frozen=True)
class LoopSpec:
    """One loop: which it is, how its operands go in and its results come out.

    ``head`` marks a loop that holds the widest value of the graph, as that of the logits does.
    """

    place: Place
    extents: tuple[Extent, ...]
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    chunk_size: int
    descending: bool
    head: bool = False

    @property
    def name(self) -> str:
        """What the loop is called in graphs and reports."""
        return str(self.place)

    def of_later_segment(self, by: int) -> LoopSpec:
        """The same loop of an equal segment whose number is greater ``by`` so much."""
        return replace(self, place=replace(self.place, segment=self.place.segment + by))


def chunk_count(length: int, chunk_size: int) -> int:
    """How often a body runs; an empty sequence is one empty chunk."""
    return max(1, -(-length // chunk_size))


def chunk_bounds(length: int, chunk_size: int, descending: bool) -> Iterator[tuple[int, int]]:
    """Balanced chunks ``(s, e)`` of ``range(length)``: sizes differ by one at most."""
    count = chunk_count(length, chunk_size)
    small, extra = divmod(length, count)
    bounds = []
    start = 0
    for index in range(count):
        end = start + small + (1 if index < extra else 0)
        bounds.append((start, end))
        start = end
    return iter(reversed(bounds) if descending else bounds)


def local_range(extent: Extent, length: int, start: int, end: int) -> tuple[int, int]:
    """``(offset, size)`` of chunk ``[start, end)`` inside the part that ``extent`` covers.

    Of a chunk that lies outside, the size is 0 and the offset is that of the chunk's nearer end,
    outside of the part: bodies subtract offsets to see how much of a chunk a slice drops.
    """
    first = min(max(start, extent.lo), end)
    return first - extent.lo, max(0, min(end, length - extent.hi) - first)


def take_chunk(value: Tensor, along: Along, total: int, offset: int, size: int) -> Tensor:
    """The chunk of ``value``, contiguous, so that a body sees one layout whatever it came from."""
    outer = value.size(along.dim) // (total * along.inner)
    offset = min(max(offset, 0), total - size)  # an empty chunk may lie outside
    if outer == 1:
        part = value.narrow(along.dim, offset * along.inner, size * along.inner)
        return part.contiguous()
    factors = value.unflatten(along.dim, (outer, total * along.inner))
    part = factors.narrow(along.dim + 1, offset * along.inner, size * along.inner)
    return part.flatten(along.dim, along.dim + 1).contiguous()


def put_chunk(
    buffer: Tensor | None, chunk: Tensor, along: Along, total: int, offset: int, size: int
) -> Tensor | None:
    """Write ``chunk`` into ``buffer``, allocated at the first chunk that is not empty."""
    if size == total:
        return chunk.contiguous()
    if size == 0:
        return buffer
    outer = chunk.size(along.dim) // (size * along.inner)
    if buffer is None:
        shape = list(chunk.shape)
        shape[along.dim] = outer * total * along.inner
        buffer = chunk.new_empty(shape)
    target = buffer
    if outer != 1:
        target = buffer.unflatten(along.dim, (outer, total * along.inner))
        chunk = chunk.unflatten(along.dim, (outer, size * along.inner))
        target.narrow(along.dim + 1, offset * along.inner, size * along.inner).copy_(chunk)
    else:
        target.narrow(along.dim, offset * along.inner, size * along.inner).copy_(chunk)
    return buffer


def chunk_ranges(
    spec: LoopSpec, length: int, start: int, end: int
) -> dict[Extent, tuple[int, int]]:
    """`local_range` of chunk ``[start, end)`` in each of the loop's extents."""
    return {extent: local_range(extent, length, start, end) for extent in spec.extents}


def chunk_inputs(
    spec: LoopSpec, length: int, operands: Sequence[Any], ranges: dict[Extent, tuple[int, int]]
) -> list[Any]:
    """What a body is called with: ``(offset, size)`` of each extent, then the operands."""
    inputs: list[Any] = [number for extent in spec.extents for number in ranges[extent]]
    for operand, value in zip(spec.operands, operands, strict=True):
        along = operand.along
        if along is None:
            inputs.append(value)
        else:
            total = length - along.extent.lo - along.extent.hi
            inputs.append(take_chunk(value, along, total, *ranges[along.extent]))
    return inputs


def run_loop(
    body: Callable[..., Sequence[Any]], spec: LoopSpec, length: int, operands: Sequence[Any]
) -> tuple[Tensor, ...]:
    """Run ``body`` once for each chunk: the meaning of a loop node.

    Args:
        body: takes ``(offset, size)`` of each extent, then the operands; returns the chunk of
            each concatenated result, in order.
        spec: how operands go in and results come out.
        length: tokens of the streamed axis.
        operands: one for each of ``spec.operands``.
    """
    buffers: list[Tensor | None] = [None] * len(spec.results)
    concatenated = [index for index, result in enumerate(spec.results) if result.along is not None]
    for start, end in chunk_bounds(length, spec.chunk_size, spec.descending):
        ranges = chunk_ranges(spec, length, start, end)
        inputs = chunk_inputs(spec, length, operands, ranges)
        outputs = body(*inputs)
        del inputs
        for index, chunk in zip(concatenated, outputs, strict=True):
            along = spec.results[index].along
            if along is None:
                continue
            offset, size = ranges[along.extent]
            total = length - along.extent.lo - along.extent.hi
            buffers[index] = put_chunk(buffers[index], chunk, along, total, offset, size)
        del outputs
    finished: list[Tensor] = []
    for result, buffer in zip(spec.results, buffers, strict=True):
        if result.buffer is not None:
            total_sum: Tensor = operands[result.buffer]
            finished.append(total_sum if result.dtype is None else total_sum.to(result.dtype))
        elif buffer is not None:
            finished.append(buffer)
    return tuple(finished)


class StreamLoop(HigherOrderOperator):
    """``streambp_loop(body, length, *operands) -> results``; ``body.spec`` is its spec."""

    def __init__(self) -> None:
        super().__init__("streambp_loop")

    def __call__(self, body: Any, length: int, *operands: Any) -> tuple[Tensor, ...]:
        return run_loop(body, body.spec, length, operands)


streambp_loop = StreamLoop()

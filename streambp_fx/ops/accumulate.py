"""Mutable ops for loop bodies: sums into accumulators, reads and writes of chunks of buffers.

They are opaque to Inductor, which compiles them without a copy of the mutated buffer; a plain
``addmm`` followed by ``copy_`` would allocate a temporary as large as the weight in every chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .narrow_products import add_narrow_product, is_narrow_product

_TILE = 2**21
"""Elements of an operand that are upcast at once."""

_LIBRARY = torch.library.Library("streambp", "FRAGMENT")
_LIBRARY.define("accumulate_(Tensor(a!) accumulator, Tensor part) -> ()")
_LIBRARY.define("accumulate_mm_(Tensor(a!) accumulator, Tensor left, Tensor right) -> ()")
_LIBRARY.define(
    "accumulate_index_put_(Tensor(a!) accumulator, Tensor? mask, Tensor?[] indices, Tensor values)"
    " -> ()"
)
_LIBRARY.define("write_chunk_(Tensor(a!) buffer, Tensor chunk, int dim, SymInt start) -> ()")
_LIBRARY.define(
    "read_chunk(Tensor buffer, int dim, SymInt start, SymInt length, ScalarType dtype) -> Tensor"
)


def accumulate_(accumulator: Tensor, part: Tensor) -> None:
    """``accumulator += part``, cast to the accumulator's dtype first."""
    accumulator.add_(part)


def accumulate_mm_(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """``accumulator += left @ right`` in the accumulator's precision.

    Args:
        accumulator: ``[m, n]`` or ``[b, m, n]``, at least as wide a dtype as the operands.
        left: ``[m, c]`` or ``[b, m, c]``; right: ``[c, n]`` or ``[b, c, n]``. Narrower operands
            are upcast, ``left`` a tile at a time and never the product, except where the machine
            has a product of narrow operands with a wide result: CUDA, and bfloat16 on some CPUs.
    """
    dtype = accumulator.dtype
    batched = accumulator.dim() == 3
    add = torch.Tensor.baddbmm_ if batched else torch.Tensor.addmm_
    if left.dtype == dtype:
        add(accumulator, left, right)
    elif accumulator.is_cuda and dtype == torch.float32:
        op = torch.ops.aten.baddbmm if batched else torch.ops.aten.addmm
        op.dtype_out(accumulator, left, right, dtype, out=accumulator)
    elif is_narrow_product(accumulator, left, right):
        add_narrow_product(accumulator, left, right)
    else:
        rows = max(1, _TILE * left.size(0) // max(1, left.numel()))
        lefts = left.split(rows)
        rights = right.split(rows) if batched else (right.to(dtype),) * len(lefts)
        for total, one, other in zip(accumulator.split(rows), lefts, rights, strict=True):
            add(total, one.to(dtype), other.to(dtype))


def accumulate_index_put_(
    accumulator: Tensor, mask: Tensor | None, indices: list[Tensor | None], values: Tensor
) -> None:
    """Add ``values`` at ``indices`` of ``accumulator``, where ``mask`` allows."""
    values = values.to(accumulator.dtype)
    if mask is not None:
        # As in `aten._unsafe_masked_index_put_accumulate`: an index under a false mask may be out
        # of range, and adds zero.
        values = values.masked_fill(~mask, 0)
        indices = [
            None
            if index is None
            else index.clamp(-accumulator.size(dim), accumulator.size(dim) - 1)
            for dim, index in enumerate(indices)
        ]
    torch.ops.aten.index_put_.default(accumulator, indices, values, True)


def write_chunk_(buffer: Tensor, chunk: Tensor, dim: int, start: int) -> None:
    """``buffer[start : start + c] = chunk`` along ``dim``."""
    buffer.narrow(dim, start, chunk.size(dim)).copy_(chunk)


def read_chunk(buffer: Tensor, dim: int, start: int, length: int, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of ``buffer[start : start + length]`` along ``dim``, in ``dtype``."""
    part = buffer.narrow(dim, start, length)
    return torch.empty(part.shape, dtype=dtype, device=buffer.device).copy_(part)


def _read_chunk_fake(
    buffer: Tensor, dim: int, start: int, length: int, dtype: torch.dtype
) -> Tensor:
    shape = list(buffer.shape)
    shape[dim] = length
    return buffer.new_empty(shape, dtype=dtype)


for _name, _function in (
    ("accumulate_", accumulate_),
    ("accumulate_mm_", accumulate_mm_),
    ("accumulate_index_put_", accumulate_index_put_),
    ("write_chunk_", write_chunk_),
    ("read_chunk", read_chunk),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")

IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.streambp.accumulate_.default: accumulate_,
    torch.ops.streambp.accumulate_mm_.default: accumulate_mm_,
    torch.ops.streambp.accumulate_index_put_.default: accumulate_index_put_,
    torch.ops.streambp.write_chunk_.default: write_chunk_,
    torch.ops.streambp.read_chunk.default: read_chunk,
}

torch.library.register_fake("streambp::read_chunk", _read_chunk_fake, lib=_LIBRARY)
for _name in ("accumulate_", "accumulate_mm_", "accumulate_index_put_", "write_chunk_"):
    torch.library.register_fake(f"streambp::{_name}", lambda *args: None, lib=_LIBRARY)

"""The two ways to compute a tile of attention, behind one interface.

`KernelEngine` calls torch's kernels, `TensorOpsEngine` plain tensor ops; `engine_for` chooses.
An engine also says how it wants the score matrix cut into tiles. Query and key indices are those
of the whole sequence, as ranges; tensors of rows hold the rows of one tile, those of keys the
keys of one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import attention_math as tensor_ops
from .attention_bias import additive_dtype, fill_of_masked_rows, rows_with_a_key, tile_bias
from .attention_dropout import keep_factors
from .attention_kernels import Kernel, kernel_for

# Keys of a tile: bounds its gradients of key and value in backward, and its bias.
_KEYS = 2048
# Forward has no gradients to bound. Tiles are wider there as long as the bias stays below this
# number of elements: each merge is one more rounding of narrow dtypes.
_BIAS = 2**22
# Of a tile in tensor ops four matrices of scores exist at a time: together about 2 ** 24 elements.
_SCORES = 2**22


@dataclass(frozen=True)
class Attending:
    """Which keys the rows of a chunk attend to, and how.

    start: index of the chunk's first row in the sequence. bias: of the chunk's rows, 4-D, or
    ``None``. seed: of dropout. With ``causal``, keys after the query are excluded whatever the
    bias says.
    """

    start: int
    bias: Tensor | None
    seed: Tensor | None
    causal: bool
    scale: float
    dropout_p: float


class Engine(Protocol):
    """How a chunk is cut into tiles, and how one is computed."""

    def row_blocks(self) -> list[range]:
        """Blocks of the chunk's rows."""

    def key_blocks(self, rows: range, backward: bool) -> list[range]:
        """Blocks of the keys that ``rows`` may attend to."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rows: range, keys: range
    ) -> tuple[Tensor, Tensor]:
        """``(out, logsumexp)`` over the tile's keys; 0 and ``-inf`` in rows without a key."""

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        rows: range,
        keys: range,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of the gradients; ``out`` and ``logsumexp`` are over all keys."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tiles and chunks are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def engine_for(query: Tensor, key: Tensor, value: Tensor, how: Attending) -> Engine:
    """The engine for a chunk: a kernel's if one computes what is asked, else tensor ops."""
    chunk = range(how.start, how.start + query.shape[2])
    keys = range(chunk.stop if how.causal else key.shape[2])
    fill = None
    if how.bias is not None:
        dtype = additive_dtype(how.bias, query)
        fill = fill_of_masked_rows(
            how.bias, how.start, chunk, blocks(keys, _KEYS), how.causal, dtype
        )
    kernel = kernel_for(query, value, how.bias is not None)
    if kernel is not None and how.dropout_p == 0.0 and fill is None:
        narrow = accumulation_dtype(query.dtype) != query.dtype
        return KernelEngine(how, kernel, chunk, keys, narrow)
    batch, heads = query.shape[:2]
    return TensorOpsEngine(how, chunk, keys, fill, batch * heads)


def blocks(indices: range, size: int) -> list[range]:
    """``indices`` in consecutive blocks of ``size``, the last one maybe shorter."""
    return [indices[first : first + size] for first in range(0, len(indices), size)]


@dataclass(frozen=True)
class KernelEngine:
    """Tiles by one of torch's kernels; the chunk's rows are one block."""

    how: Attending
    kernel: Kernel
    chunk: range
    keys: range
    narrow: bool

    def row_blocks(self) -> list[range]:
        return [self.chunk]

    def key_blocks(self, rows: range, backward: bool) -> list[range]:
        if self.how.bias is not None:
            batch, heads, *_ = self.how.bias.shape
            return blocks(self.keys, self._width(batch * heads * len(rows), backward))
        first = self._first_of_triangle(rows, backward) if self.how.causal else self.keys.stop
        before, triangle = self.keys[:first], self.keys[first:]
        tiles = blocks(before, _KEYS if backward else max(1, first))
        return [*tiles, triangle] if triangle else tiles

    def _first_of_triangle(self, rows: range, backward: bool) -> int:
        """The first key of the tile with the triangle; all rows see the keys before it.

        That tile is a square in wide dtypes: an unmasked call over the past, and a causal one that
        skips half of its tile, are fastest, and merging costs no precision there. In narrow dtypes
        it takes in some of the past: one call instead of two that are merged rounds once.
        """
        if self.kernel.aligns_lower_right and not backward:
            return 0
        if not self.narrow:
            return rows.start
        return min(rows.start, max(0, rows.stop - self._width(len(rows), backward)))

    def _width(self, bias_rows: int, backward: bool) -> int:
        return _KEYS if backward else max(_KEYS, _BIAS // bias_rows)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rows: range, keys: range
    ) -> tuple[Tensor, Tensor]:
        bias = self._bias(query, rows, keys)
        out, logsumexp = self.kernel.forward(
            query, key, value, bias, self._lower_right(rows, keys), self.how.scale
        )
        if bias is not None:
            # Kernels report a finite log-sum-exp for a row that sees no key.
            blind = ~rows_with_a_key(bias)
            out = out.masked_fill(blind.unsqueeze(-1), 0.0)
            logsumexp = logsumexp.masked_fill(blind, -math.inf)
        return out, logsumexp

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        rows: range,
        keys: range,
    ) -> tuple[Tensor, Tensor, Tensor]:
        bias = self._bias(query, rows, keys)
        if bias is not None:
            # exp(-inf - 0) is 0 where exp(-inf + inf) is not a number.
            logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
        lower_right = self._lower_right(rows, keys)
        return self.kernel.backward(
            grad_out, query, key, value, bias, out, logsumexp, lower_right, self.how.scale
        )

    def _bias(self, query: Tensor, rows: range, keys: range) -> Tensor | None:
        if self.how.bias is None:
            return None
        dtype = additive_dtype(self.how.bias, query)
        return tile_bias(
            self.how.bias, self.how.start, rows, keys, self.how.causal, dtype, query.device
        )

    def _lower_right(self, rows: range, keys: range) -> bool:
        return self.how.causal and self.how.bias is None and keys.stop == rows.stop


@dataclass(frozen=True)
class TensorOpsEngine:
    """Tiles by plain tensor ops, for dropout, head sizes no kernel takes, and filled rows."""

    how: Attending
    chunk: range
    keys: range
    fill: Tensor | None
    batch_heads: int

    def row_blocks(self) -> list[range]:
        width = max(1, self.batch_heads * min(_KEYS, len(self.keys)))
        return blocks(self.chunk, max(1, _SCORES // width))

    def key_blocks(self, rows: range, backward: bool) -> list[range]:
        return blocks(range(rows.stop) if self.how.causal else self.keys, _KEYS)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rows: range, keys: range
    ) -> tuple[Tensor, Tensor]:
        terms = self._terms(query, rows, keys)
        dtype = accumulation_dtype(query.dtype)
        return tensor_ops.forward_tile(query.to(dtype), key.to(dtype), value.to(dtype), terms)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        rows: range,
        keys: range,
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms = self._terms(query, rows, keys)
        dtype = accumulation_dtype(query.dtype)
        grad_out = grad_out.to(dtype)
        delta = (grad_out * out).sum(-1, keepdim=True)
        return tensor_ops.backward_tile(
            grad_out, query.to(dtype), key.to(dtype), value.to(dtype), logsumexp, delta, terms
        )

    def _terms(self, query: Tensor, rows: range, keys: range) -> tensor_ops.TileTerms:
        how = self.how
        dtype = accumulation_dtype(query.dtype)
        bias = tile_bias(how.bias, how.start, rows, keys, how.causal, dtype, query.device)
        fill = self.fill
        if fill is not None and fill.shape[2] != 1:
            fill = fill[:, :, rows.start - how.start : rows.stop - how.start]
        keep = None
        if how.dropout_p > 0.0:
            if how.seed is None:
                raise ValueError(
                    "attention with dropout_p > 0 needs a seed: an int64 scalar tensor"
                )
            batch, heads = query.shape[:2]
            keep = keep_factors(how.seed, batch, heads, rows, keys, how.dropout_p, dtype)
        return tensor_ops.TileTerms(bias, fill, keep, how.scale)

"""Attention of a chunk of queries over its keys, as tiles that are merged by log-sum-exp.

The score matrix of a chunk is cut into blocks of keys, so that what one tile needs beside its
operands has a bounded size, and into blocks of rows where the scores themselves exist.
``exp(logsumexp)`` is a tile's weight in the merge, which runs in float32 for narrower inputs:
merging in bfloat16 triples the error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attention_engines import Attending, accumulation_dtype, engine_for


def forward_chunk(
    query: Tensor, key: Tensor, value: Tensor, how: Attending
) -> tuple[Tensor, Tensor]:
    """``(out [B, H, c, Ev], logsumexp [B, H, c])`` of the chunk over its keys.

    ``out`` lies in memory as ``[B, c, H, Ev]``. A row that has no allowed key has ``out`` 0 and
    ``logsumexp`` ``-inf``.
    """
    query, key, value = map(_elements_adjacent, (query, key, value))
    batch, heads, length, _ = query.shape
    dtype = accumulation_dtype(query.dtype)
    out = query.new_zeros(batch, length, heads, value.shape[-1]).transpose(1, 2)
    logsumexp = query.new_full((batch, heads, length), -math.inf, dtype=dtype)
    if _nothing_to_attend(query, key, how):
        return out, logsumexp
    engine = engine_for(query, key, value, how)
    for rows in engine.row_blocks():
        local = slice(rows.start - how.start, rows.stop - how.start)
        merged: tuple[Tensor, Tensor] | None = None
        for keys in engine.key_blocks(rows, backward=False):
            tile = engine.forward(query[:, :, local], _at(key, keys), _at(value, keys), rows, keys)
            merged = tile if merged is None else _merge(merged, tile, dtype)
        if merged is not None:
            out[:, :, local], logsumexp[:, :, local] = merged
    return out, logsumexp


def backward_chunk(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    how: Attending,
) -> Tensor:
    """The chunk's ``grad_query``; its shares are added into ``grad_key`` and ``grad_value``.

    ``grad_query`` lies in memory as ``[B, c, H, E]``.
    """
    grad_out, query, key, value, out = map(_elements_adjacent, (grad_out, query, key, value, out))
    batch, heads, length, size = query.shape
    dtype = accumulation_dtype(query.dtype)
    grad_query = query.new_zeros(batch, length, heads, size, dtype=dtype).transpose(1, 2)
    if _nothing_to_attend(query, key, how):
        return grad_query.to(query.dtype)
    engine = engine_for(query, key, value, how)
    for rows in engine.row_blocks():
        local = slice(rows.start - how.start, rows.stop - how.start)
        for keys in engine.key_blocks(rows, backward=True):
            shares = engine.backward(
                grad_out[:, :, local],
                query[:, :, local],
                _at(key, keys),
                _at(value, keys),
                out[:, :, local],
                logsumexp[:, :, local],
                rows,
                keys,
            )
            grad_query[:, :, local].add_(shares[0])
            _at(grad_key, keys).add_(shares[1])
            _at(grad_value, keys).add_(shares[2])
    return grad_query.to(query.dtype)


def _merge(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both; either side may have seen no key."""
    logsumexp = torch.logaddexp(left[1], right[1])
    shift = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    out = left[0].to(dtype) * (left[1] - shift).exp_().unsqueeze(-1)
    out.addcmul_(right[0].to(dtype), (right[1] - shift).exp_().unsqueeze(-1))
    return out, logsumexp


def _at(tensor: Tensor, keys: range) -> Tensor:
    return tensor[:, :, keys.start : keys.stop]


def _elements_adjacent(tensor: Tensor) -> Tensor:
    """Kernels read a row's elements from adjacent memory, whatever the strides say."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _nothing_to_attend(query: Tensor, key: Tensor, how: Attending) -> bool:
    """Kernels divide by sizes."""
    return query.numel() == 0 or (key.shape[2] == 0 and not how.causal)

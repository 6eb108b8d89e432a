"""The bias of one tile of the score matrix: additive, and with the causal triangle in it.

Nothing here is larger than one tile: neither a boolean mask turned into numbers nor the triangle
ever exists for whole rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A row whose best bias is lower has no allowed key: its mask is a fill such as finfo.min.
_FILL_BELOW = -1e3


def additive_dtype(bias: Tensor, query: Tensor) -> torch.dtype:
    """The dtype SDPA adds ``bias`` in: a float32 bias is not narrowed to the query's dtype.

    Narrowing would turn ``finfo(float32).min`` into ``-inf``, which is another result in rows that
    have no allowed key.
    """
    if bias.dtype == torch.float32 and query.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return query.dtype


def triangle(rows: range, keys: range, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[len(rows), len(keys)]``: 0 where the key is not after the query, else ``-inf``."""
    full = torch.full((len(rows), len(keys)), -math.inf, dtype=dtype, device=device)
    return full.triu_(rows.start - keys.start + 1)


def tile_bias(
    bias: Tensor | None,
    chunk_start: int,
    rows: range,
    keys: range,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """The additive bias of a tile, ``None`` where there is nothing to add.

    Args:
        bias: the chunk's rows, 4-D, boolean (True: may attend) or additive; its row and key dims
            may have size 1.
        rows, keys: the tile, as indices in the whole sequence.

    Returns:
        4-D, broadcastable to ``[B, H, len(rows), len(keys)]``.
    """
    crosses_diagonal = causal and keys.stop > rows.start + 1
    additive: Tensor | None = None
    if bias is not None:
        if bias.shape[2] != 1:
            bias = bias[:, :, rows.start - chunk_start : rows.stop - chunk_start]
        if bias.shape[3] != 1:
            bias = bias[:, :, :, keys.start : keys.stop]
        if bias.dtype == torch.bool:
            additive = torch.zeros(bias.shape, dtype=dtype, device=device)
            additive.masked_fill_(~bias, -math.inf)
        else:
            additive = bias.to(dtype)
    if not crosses_diagonal:
        return additive
    diagonal = triangle(rows, keys, dtype, device)[None, None]
    return diagonal if additive is None else additive + diagonal


def rows_with_a_key(additive: Tensor) -> Tensor:
    """``[b, h, r]``: False in rows of an additive tile bias that are ``-inf`` all over."""
    return (additive > -math.inf).any(-1)


def fill_of_masked_rows(
    bias: Tensor | None,
    start: int,
    rows: range,
    key_blocks: list[range],
    causal: bool,
    dtype: torch.dtype,
) -> Tensor | None:
    """The finite fill (``finfo.min``) in rows of a float bias that have no allowed key.

    Such a row averages V over its keys: every score is absorbed by the fill. Its log-sum-exp is
    the fill plus the logarithm of the number of keys, and that logarithm is absorbed as well, so
    that neither merging nor backward could divide by the number. The fill is therefore taken out
    of the scores of these rows, and out of their log-sum-exp.

    Returns:
        ``[b, h, len(rows), 1]`` of ``dtype``: the fill in those rows, 0 elsewhere. ``None`` if
        there is no such row.
    """
    if bias is None or bias.dtype == torch.bool or not bool((bias < _FILL_BELOW).any()):
        return None
    best: Tensor | None = None
    for keys in key_blocks:
        tile = tile_bias(bias, start, rows, keys, causal, dtype, bias.device)
        if tile is not None:
            block_best = tile.amax(-1, keepdim=True)
            best = block_best if best is None else torch.maximum(best, block_best)
    if best is None:
        return None
    filled = (best < _FILL_BELOW) & (best > -math.inf)
    return torch.where(filled, best, 0.0) if bool(filled.any()) else None

"""Attention dropout whose mask is a function of (seed, query index, key index, batch * head).

A random generator gives other numbers when it is called for other shapes, so a chunked program
could not redraw the mask that the whole program drew. A counter-based generator has no state: the
mask of any tile of the score matrix is computed from the indices alone, the same in forward, in
backward and for every chunking.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., 2011) on int64 tensors that hold 32-bit words.

    The tensors broadcast against each other. A 64-bit product of two words wraps to a negative
    int64; its words are still right, because a mask follows each shift.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((high >> 32) & _WORD) ^ c1 ^ k0
        c1 = high & _WORD
        c2 = ((low >> 32) & _WORD) ^ c3 ^ k1
        c3 = low & _WORD
        k0 = (k0 + _KEY_INCREMENTS[0]) & _WORD
        k1 = (k1 + _KEY_INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


def keep_factors(
    seed: Tensor,
    batch: int,
    heads: int,
    rows: range,
    keys: range,
    dropout_p: float,
    dtype: torch.dtype,
) -> Tensor:
    """What the attention weights of a tile are multiplied by: 0 or ``1 / (1 - dropout_p)``.

    Args:
        seed: int64 scalar.
        rows, keys: the tile's query and key indices in the whole sequence.

    Returns:
        ``[batch, heads, len(rows), len(keys)]`` of ``dtype``.
    """
    if dropout_p >= 1.0:
        return torch.zeros(batch, heads, len(rows), len(keys), dtype=dtype, device=seed.device)

    def indices(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, dtype=torch.int64, device=seed.device)

    first_group = keys.start // _LANES
    row = indices(rows.start, rows.stop)[:, None]
    group = indices(first_group, -(-keys.stop // _LANES))
    head = indices(0, batch * heads)[:, None, None]
    words = philox4x32(
        (row, group, head, torch.zeros_like(group)), (seed & _WORD, (seed >> 32) & _WORD)
    )
    dropped_below = round(dropout_p * (_WORD + 1))
    kept = torch.stack([word >= dropped_below for word in words], dim=-1).flatten(-2)
    first_key = keys.start - first_group * _LANES
    kept = kept[..., first_key : first_key + len(keys)]
    return kept.to(dtype).mul_(1.0 / (1.0 - dropout_p)).unflatten(0, (batch, heads))

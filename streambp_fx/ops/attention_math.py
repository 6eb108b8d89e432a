"""One tile of attention in plain tensor ops, for what the kernels do not take.

That is dropout (its mask must not depend on the chunking), head sizes that a kernel refuses, and
rows whose mask is a finite fill. Everything is computed in the accumulation dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class TileTerms(NamedTuple):
    """What enters the scores and weights of a tile beside query, key and value.

    bias: additive, ``[b, h, r, k]`` broadcastable. fill: taken out of the scores after the bias is
    added, ``[b, h, r, 1]``. keep: dropout factors of the weights, ``[B, H, r, k]``.
    """

    bias: Tensor | None
    fill: Tensor | None
    keep: Tensor | None
    scale: float


def forward_tile(
    query: Tensor, key: Tensor, value: Tensor, terms: TileTerms
) -> tuple[Tensor, Tensor]:
    """``(out [B, H, r, Ev], logsumexp [B, H, r])`` of the tile alone; 0 and ``-inf`` where a row
    has no key in it."""
    scores = _scores(query, key, terms)
    logsumexp = scores.logsumexp(-1)
    weights = _weights(scores, logsumexp)
    if terms.keep is not None:
        weights.mul_(terms.keep)
    return _per_query_head(_per_key_head(weights, key) @ value, query), logsumexp


def backward_tile(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logsumexp: Tensor,
    delta: Tensor,
    terms: TileTerms,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's share of ``(grad_query, grad_key, grad_value)``.

    Args:
        logsumexp: of the rows over all their keys.
        delta: ``sum(grad_out * out)`` of the rows, ``[B, H, r, 1]``, with ``out`` over all keys.
    """
    weights = _weights(_scores(query, key, terms), logsumexp)
    grad_out = _per_key_head(grad_out, key)
    grad_weights = _per_query_head(grad_out @ value.mT, query)
    if terms.keep is not None:
        grad_weights.mul_(terms.keep)
        dropped = weights * terms.keep
    else:
        dropped = weights
    grad_value = _per_key_head(dropped, key).mT @ grad_out
    grad_scores = grad_weights.sub_(delta).mul_(weights).mul_(terms.scale)
    grad_scores = _per_key_head(grad_scores, key)
    grad_query = _per_query_head(grad_scores @ key, query)
    grad_key = grad_scores.mT @ _per_key_head(query, key)
    return grad_query, grad_key, grad_value


def _scores(query: Tensor, key: Tensor, terms: TileTerms) -> Tensor:
    scores = _per_query_head(_per_key_head(query, key) @ key.mT, query).mul_(terms.scale)
    if terms.bias is not None:
        scores.add_(terms.bias)
    if terms.fill is not None:
        scores.sub_(terms.fill)
    return scores


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """``exp(scores - logsumexp)``, in place; 0 in rows without a key."""
    finite = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return scores.sub_(finite.unsqueeze(-1)).exp_()


def _per_key_head(rows: Tensor, key: Tensor) -> Tensor:
    """``[B, H, r, x] -> [B, Hkv, G * r, x]``: grouped heads are more rows of their key head."""
    batch, heads, length, size = rows.shape
    key_heads = key.shape[1]
    return rows.reshape(batch, key_heads, heads // key_heads * length, size)


def _per_query_head(rows: Tensor, query: Tensor) -> Tensor:
    """``[B, Hkv, G * r, x] -> [B, H, r, x]``."""
    return rows.reshape(query.shape[0], query.shape[1], query.shape[2], rows.shape[-1])

"""Attention in the body of a loop: a chunk of queries over the keys that it may see.

Given:  ``attention(q, k, v, bias, seed, causal=True, ...)``, q streamed
Result: forward: ``write_chunk_(K, k, start)``, ``write_chunk_(V, v, start)``, buffers of the loop;
        then, as in backward: ``attention_chunk(q_chunk, K, V, bias_rows, seed, start, ...)``

Backward adds to buffers for dK and dV. Where attention is causal, those rows of them that belong
to the chunk are complete, since the loop descends, and are read at once; else when it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .axes import attention_arguments
from .body import LengthArg, OffsetArg, Ref
from .loops import Result
from .placement import Streamed, value_of
from .rules.sizes import same_size

if TYPE_CHECKING:
    from .body_builder import BodyBuilder

streambp = torch.ops.streambp
QUERY_ROWS = Streamed(2)


def call_attention(builder: BodyBuilder, node: Node) -> Ref:
    """Call ``streambp::attention`` for a chunk; returns its output and log-sum-exp, one value."""
    given: dict[str, Any] = attention_arguments(node)
    query = builder.chunk(given["query"], QUERY_ROWS)
    past = given["causal"] is True and not builder.backward
    key, value = (_keys(builder, given[name], past) for name in ("key", "value"))
    return builder.call(
        streambp.attention_chunk.default,
        (query, key, value, *_mask(builder, given), OffsetArg(), *_settings(given)),
    )


def call_attention_backward(builder: BodyBuilder, node: Node) -> tuple[Ref, Any, Any]:
    """Call the backward for a chunk; returns the gradients of query, key and value."""
    given: dict[str, Any] = attention_arguments(node)
    grad_out, query, out, logsumexp = (
        builder.chunk(given[name], QUERY_ROWS) for name in ("grad_out", "query", "out", "logsumexp")
    )
    key, value = builder.whole(given["key"]), builder.whole(given["value"])
    dtype = value_of(given["key"]).dtype
    wide = builder.accumulator_dtype(dtype)
    masking = _mask(builder, given)
    sums = [builder.buffer(given[name], True, wide) for name in ("key", "value")]
    grad_query = builder.call(
        streambp.attention_chunk_backward.default,
        (
            *(grad_out, query, key, value, *masking, out, logsumexp),
            *(*sums, OffsetArg(), *_settings(given)),
        ),
    )
    if given["causal"] is not True:
        final = None if wide == dtype else dtype
        grad_key, grad_value = (Result(buffer=one.index, dtype=final) for one in sums)
        return grad_query, grad_key, grad_value
    done = [
        builder.call(streambp.read_chunk.default, (one, 2, OffsetArg(), LengthArg(), dtype))
        for one in sums
    ]
    return grad_query, done[0], done[1]


def _keys(builder: BodyBuilder, node: Node, past: bool) -> Ref:
    """Keys or values: a buffer that this loop fills, or the whole value."""
    if not past or node not in builder.made:
        return builder.whole(node)
    key = (node, "past")
    if key not in builder.taken:
        buffer = builder.buffer(node, False, value_of(node).dtype)
        builder.call(streambp.write_chunk_.default, (buffer, builder.made[node], 2, OffsetArg()))
        builder.taken[key] = buffer
    return builder.taken[key]


def _mask(builder: BodyBuilder, given: dict[str, Any]) -> tuple[Ref | None, Ref | None]:
    """The rows of the bias that belong to the chunk, with all keys, and the seed of dropout."""
    bias, seed = given["bias"], given["seed"]
    return (
        None if bias is None else _bias_rows(builder, bias),
        None if seed is None else builder.whole(seed),
    )


def _bias_rows(builder: BodyBuilder, bias: Node) -> Ref:
    shape = value_of(bias).shape
    rows = len(shape) - 2
    if rows < 0 or same_size(shape[rows], 1):
        return builder.whole(bias)
    return builder.chunk(bias, Streamed(rows))


def _settings(given: dict[str, Any]) -> tuple[Any, Any, Any]:
    return given["causal"], given["scale"], given["dropout_p"]

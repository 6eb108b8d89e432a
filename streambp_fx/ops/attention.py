"""``streambp::attention`` and its forms for one chunk of the sequence.

One op for scaled dot product attention on every device, whose ``logsumexp`` is a result, so that
the passes can turn it into a loop over chunks of the queries. The shapes, everywhere:

    query [B, H, L, E]   key [B, Hkv, S, E]   value [B, Hkv, S, Ev]   out [B, H, L, Ev]

H is a multiple of Hkv: heads are grouped by adjacency, as in ``enable_gqa``. ``bias`` broadcasts
to [B, H, L, S] and is boolean (True: may attend) or additive. ``causal`` excludes keys after the
query, together with the bias. ``seed`` is an int64 scalar, used where ``dropout_p`` > 0; the mask
is a function of the seed and of the indices in the whole sequence. A row that has no allowed key
gets 0, as from SDPA; a row whose bias is a finite fill (``finfo.min``) all over averages V.

``out`` and ``grad_query`` lie in memory as [B, L, H, *]; ``logsumexp`` is [B, H, L] in float32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .attention_engines import Attending, accumulation_dtype
from .attention_tiles import backward_chunk, forward_chunk

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

torch.library.define(
    "streambp::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seed, bool causal, "
    "float scale, float dropout_p) -> (Tensor out, Tensor logsumexp)",
    tags=_TAGS,
)
torch.library.define(
    "streambp::attention_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seed, "
    "Tensor out, Tensor logsumexp, bool causal, float scale, float dropout_p) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    tags=_TAGS,
)
torch.library.define(
    "streambp::attention_chunk",
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seed, SymInt start, "
    "bool causal, float scale, float dropout_p) -> (Tensor out, Tensor logsumexp)",
    tags=_TAGS,
)
torch.library.define(
    "streambp::attention_chunk_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? seed, "
    "Tensor out, Tensor logsumexp, Tensor(a!) grad_key, Tensor(b!) grad_value, SymInt start, "
    "bool causal, float scale, float dropout_p) -> Tensor grad_query",
    tags=_TAGS,
)


@torch.no_grad()
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    _check_operands(query, key, value)
    _check_square(query, key, causal)
    how = Attending(0, _four_dims(bias), seed, causal, scale, dropout_p)
    return forward_chunk(query, key, value, how)


@torch.no_grad()
def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_square(query, key, causal)
    how = Attending(0, _four_dims(bias), seed, causal, scale, dropout_p)
    dtype = accumulation_dtype(key.dtype)
    grad_key, grad_value = (_rows_first(tensor, dtype).zero_() for tensor in (key, value))
    grad_query = backward_chunk(
        grad_out, query, key, value, out, logsumexp, grad_key, grad_value, how
    )
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


@torch.no_grad()
def _attention_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    start: int,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Rows [start, start + c) of `attention`. ``key`` and ``value`` are whole buffers, of which a
    causal chunk reads [0, start + c) alone; ``bias`` holds the chunk's rows."""
    _check_operands(query, key, value)
    _check_chunk(query, key, start, causal)
    how = Attending(start, _four_dims(bias), seed, causal, scale, dropout_p)
    return forward_chunk(query, key, value, how)


@torch.no_grad()
def _attention_chunk_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    start: int,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The gradient of the chunk's queries; adds its share into the whole ``grad_key`` and
    ``grad_value`` (float32 for narrower inputs), of which a causal chunk touches
    [0, start + c) alone."""
    _check_chunk(query, key, start, causal)
    how = Attending(start, _four_dims(bias), seed, causal, scale, dropout_p)
    return backward_chunk(grad_out, query, key, value, out, logsumexp, grad_key, grad_value, how)


@torch.library.register_fake("streambp::attention")
def _fake_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch, heads, length, dtype=accumulation_dtype(query.dtype))


@torch.library.register_fake("streambp::attention_backward")
def _fake_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (
        _rows_first(tensor, tensor.dtype) for tensor in (query, key, value)
    )
    return grad_query, grad_key, grad_value


@torch.library.register_fake("streambp::attention_chunk")
def _fake_attention_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    start: int,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    return _fake_attention(query, key, value, bias, seed, causal, scale, dropout_p)


@torch.library.register_fake("streambp::attention_chunk_backward")
def _fake_attention_chunk_backward(grad_out: Tensor, query: Tensor, *_: object) -> Tensor:
    return _rows_first(query, query.dtype)


def _save_for_backward(
    ctx: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool, float, float],
    output: tuple[Tensor, Tensor],
) -> None:
    query, key, value, bias, seed, causal, scale, dropout_p = inputs
    out, logsumexp = output
    ctx.mark_non_differentiable(logsumexp)
    ctx.set_materialize_grads(False)
    if bias is not None and bias.is_inference():  # has no gradient, but autograd saves none such
        bias = bias.clone()
    ctx.save_for_backward(query, key, value, bias, seed, out, logsumexp)
    ctx.constants = (causal, scale, dropout_p)


def _backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    gradients = torch.ops.streambp.attention_backward(
        grad_out,
        *ctx.saved_tensors,
        *ctx.constants,
    )
    return (*gradients, None, None, None, None, None)


torch.library.register_autograd("streambp::attention", _backward, setup_context=_save_for_backward)


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.streambp.attention.default: _attention,
    torch.ops.streambp.attention_backward.default: _attention_backward,
    torch.ops.streambp.attention_chunk.default: _attention_chunk,
    torch.ops.streambp.attention_chunk_backward.default: _attention_chunk_backward,
}
for _op, _function in IMPLEMENTATIONS.items():
    torch.library.impl(_op.name(), "CompositeExplicitAutograd")(_function)


def _rows_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty ``[B, H, L, x]`` like ``tensor`` that lies in memory as ``[B, L, H, x]``."""
    batch, heads, length, size = tensor.shape
    return tensor.new_empty(batch, length, heads, size, dtype=dtype).transpose(1, 2)


def _four_dims(bias: Tensor | None) -> Tensor | None:
    """``bias`` with leading dims of size 1, as broadcasting would add them."""
    return None if bias is None else bias[(None,) * (4 - bias.dim())]


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "attention takes query, key and value of one dtype, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    if query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"attention takes a multiple of the {key.shape[1]} key heads as query heads, "
            f"got {query.shape[1]}"
        )


def _check_square(query: Tensor, key: Tensor, causal: bool) -> None:
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            "causal attention takes as many queries as keys, got "
            f"{query.shape[2]} and {key.shape[2]}; use attention_chunk for some of the rows"
        )


def _check_chunk(query: Tensor, key: Tensor, start: int, causal: bool) -> None:
    if start < 0 or (causal and start + query.shape[2] > key.shape[2]):
        raise ValueError(
            f"rows [{start}, {start + query.shape[2]}) are not in a sequence of {key.shape[2]}"
        )

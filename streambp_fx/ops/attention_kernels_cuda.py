"""One tile of attention by the flash and the memory-efficient kernel on CUDA.

Both align the triangle of ``is_causal`` to the lower right here. See `attention_kernels` for the
meaning of the arguments. These aten ops take ``[B, L, H, E]``; strides of operands are the
caller's, but for adjacent elements of a row, and for what is made contiguous below.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_HEAD_SIZE = 256
_HEAD_SIZE_MULTIPLE = 8
_BIAS_KEYS_MULTIPLE = 8
_LOGSUMEXP_ROWS_MULTIPLE = 32
_NO_MASK, _LOWER_RIGHT = 0, 2


def flash_takes(query: Tensor, value: Tensor, biased: bool) -> bool:
    """Whether the flash kernel takes these operands."""
    size = query.shape[-1]
    return (
        not biased
        and query.dtype in _FLASH_DTYPES
        and size == value.shape[-1]
        and size % _HEAD_SIZE_MULTIPLE == 0
        and size <= _FLASH_MAX_HEAD_SIZE
    )


def efficient_takes(query: Tensor, value: Tensor) -> bool:
    """Whether the memory-efficient kernel takes these operands."""
    sizes = (query.shape[-1], value.shape[-1])
    return query.dtype in (torch.float32, *_FLASH_DTYPES) and not any(
        size % _HEAD_SIZE_MULTIPLE for size in sizes
    )


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lower_right: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Never called with a bias: see `flash_takes`."""
    out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *_rows_first(query, key, value),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        lower_right,
        False,
        scale=scale,
    )
    return out.transpose(1, 2), logsumexp


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    lower_right: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Never called with a bias: see `flash_takes`."""
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients = torch.ops.aten._flash_attention_backward(
        *_rows_first(grad_out, query, key, value, out),
        logsumexp.contiguous(),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        lower_right,
        no_dropout_state,
        no_dropout_state,
        scale=scale,
    )
    grad_query, grad_key, grad_value = _rows_first(*gradients)
    return grad_query, grad_key, grad_value


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lower_right: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Grouped heads are repeated for this tile: the kernel does not know them."""
    rows, heads = query.shape[2], query.shape[1]
    out, logsumexp, *_ = torch.ops.aten._efficient_attention_forward(
        *_rows_first(query, _repeat(key, heads), _repeat(value, heads)),
        _aligned(bias, query, key),
        None,
        None,
        None,
        None,
        0.0,
        _LOWER_RIGHT if lower_right else _NO_MASK,
        True,
        scale=scale,
    )
    return out.transpose(1, 2), logsumexp[:, :, :rows]


def efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    lower_right: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Grouped heads are repeated for this tile: the kernel does not know them.

    It reads ``out`` by strides that it computes from the sizes, and rows of ``logsumexp`` as if
    they were adjacent, whatever the strides of both.
    """
    rows, heads = query.shape[2], query.shape[1]
    no_dropout_state = torch.zeros((), dtype=torch.int64, device=query.device)
    # exp(scores - inf) is 0: rows of padding take part in nothing.
    padded = F.pad(logsumexp, (0, -rows % _LOGSUMEXP_ROWS_MULTIPLE), value=math.inf).contiguous()
    grad_query, grad_key, grad_value, _ = torch.ops.aten._efficient_attention_backward(
        *_rows_first(grad_out, query, _repeat(key, heads), _repeat(value, heads)),
        _aligned(bias, query, key),
        out.transpose(1, 2).contiguous(),
        None,
        None,
        rows,
        key.shape[2],
        padded,
        0.0,
        no_dropout_state,
        no_dropout_state,
        _LOWER_RIGHT if lower_right else _NO_MASK,
        False,
        scale=scale,
    )
    grad_query, grad_key, grad_value = _rows_first(grad_query, grad_key, grad_value)
    return grad_query, _add_groups(grad_key, key), _add_groups(grad_value, key)


def _rows_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, S, x] -> [B, heads, S, x]``."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _add_groups(gradient: Tensor, key: Tensor) -> Tensor:
    """``[B, H, S, x] -> [B, Hkv, S, x]``: the gradient of `_repeat`."""
    if gradient.shape[1] == key.shape[1]:
        return gradient
    return gradient.unflatten(1, (key.shape[1], -1)).sum(2)


def _aligned(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The bias in the query's dtype and full shape, its rows padded to what the kernel can load."""
    if bias is None:
        return None
    keys = key.shape[2]
    padded = F.pad(
        bias.to(query.dtype).expand(*bias.shape[:3], keys), (0, -keys % _BIAS_KEYS_MULTIPLE)
    ).contiguous()
    return padded[..., :keys].expand(*query.shape[:3], keys)

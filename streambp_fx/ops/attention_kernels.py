"""One tile of attention by torch's own kernels, and the choice of the kernel.

A tile is called with ``lower_right=True`` when its last key is its last query and each query sees
the keys up to itself. SDPA's ``is_causal`` means that only for square tiles: for others it aligns
the triangle to the upper left, which would be wrong without any sign of it.

``out`` and ``logsumexp`` given to backward are those of the rows over all their keys, so that the
kernel's gradients are the tile's share of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import attention_kernels_cuda as cuda
from .attention_bias import triangle

ForwardTile = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, bool, float],
    tuple[Tensor, Tensor],
]
"""``(query, key, value, bias, lower_right, scale) -> (out, logsumexp)``"""

BackwardTile = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, bool, float],
    tuple[Tensor, Tensor, Tensor],
]
"""``(grad_out, query, key, value, bias, out, logsumexp, lower_right, scale)
-> (grad_query, grad_key, grad_value)``"""


@dataclass(frozen=True)
class Kernel:
    """The two calls of one kernel.

    ``aligns_lower_right``: tiles that are not square may be lower-right causal at no cost (the CPU
    kernel needs the triangle as a bias then).
    """

    forward: ForwardTile
    backward: BackwardTile
    aligns_lower_right: bool


def kernel_for(query: Tensor, value: Tensor, biased: bool) -> Kernel | None:
    """The kernel that takes these operands, ``None`` if none does."""
    if query.device.type == "cpu":
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return _CPU if query.shape[-1] == value.shape[-1] and query.dtype in dtypes else None
    if query.device.type == "cuda":
        if cuda.flash_takes(query, value, biased):
            return _FLASH
        if cuda.efficient_takes(query, value):
            return _EFFICIENT
    return None


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    lower_right: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    bias, is_causal = _cpu_triangle(query, key, bias, lower_right)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out, logsumexp


def _cpu_backward(
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
    if query.dtype in (torch.bfloat16, torch.float16):
        # The kernel is no faster in narrow dtypes, and would round each tile's share to them.
        operands = [tensor.float() for tensor in (grad_out, query, key, value, out)]
        bias = None if bias is None else bias.float()
    else:
        operands = [grad_out, query, key, value, out]
    bias, is_causal = _cpu_triangle(operands[1], key, bias, lower_right)
    grad_query, grad_key, grad_value = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, logsumexp, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    )
    return grad_query, grad_key, grad_value


def _cpu_triangle(
    query: Tensor, key: Tensor, bias: Tensor | None, lower_right: bool
) -> tuple[Tensor | None, bool]:
    """The kernel's own triangle where it means lower right, else the triangle as a bias.

    One masked call costs less time than an unmasked and a causal one that are merged, and rounds
    narrow dtypes once only.
    """
    rows, keys = query.shape[2], key.shape[2]
    if not lower_right or rows == keys:
        return bias, lower_right
    return triangle(range(keys - rows, keys), range(keys), query.dtype, query.device), False


_CPU = Kernel(_cpu_forward, _cpu_backward, aligns_lower_right=False)
_FLASH = Kernel(cuda.flash_forward, cuda.flash_backward, aligns_lower_right=True)
_EFFICIENT = Kernel(cuda.efficient_forward, cuda.efficient_backward, aligns_lower_right=True)

"""Operands of attention, SDPA's result for them, and the op run chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from streambp_fx.ops import attention_engines

streambp = torch.ops.streambp
SCALE = 0.3


@dataclass
class Case:
    """Operands of one attention, and the same attention by SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool

    def reference(self) -> Tensor:
        mask = self.bias
        if self.causal and mask is not None:
            triangle = torch.ones(self.query.shape[2], self.key.shape[2]).tril().bool()
            if mask.dtype == torch.bool:
                mask = mask & triangle
            else:
                mask = mask.masked_fill(~triangle, -math.inf)
        # The math backend: the fused one is wrong in backward for rows with a finite fill.
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                self.query,
                self.key,
                self.value,
                attn_mask=mask,
                is_causal=self.causal and mask is None,
                scale=SCALE,
                enable_gqa=True,
            )

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_case(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    queries: int = 23,
    keys: int | None = None,
    size: int = 8,
    value_size: int = 8,
    bias: Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, size: int) -> Tensor:
        drawn = torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).transpose(1, 2).requires_grad_()

    keys = queries if keys is None else keys
    return Case(
        normal(heads, queries, size),
        normal(key_heads, keys, size),
        normal(key_heads, keys, value_size),
        bias,
        causal,
    )


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(start + size, length)


def rows_of(bias: Tensor | None, start: int, stop: int) -> Tensor | None:
    if bias is None or bias.dim() < 2 or bias.shape[-2] == 1:
        return bias
    return bias[..., start:stop, :]


def run_chunked(
    case: Case,
    grad_out: Tensor,
    size: int,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Out and gradients, with what a causal chunk must not read set to nan."""
    query, key, value = (operand.detach() for operand in case.operands())
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grad_key, grad_value = (torch.zeros_like(operand, dtype=dtype) for operand in (key, value))
    outs, grad_queries = [], []
    for start, stop in reversed(list(chunks(query.shape[2], size))):
        past_key, past_value = key.clone(), value.clone()
        if case.causal:
            past_key[:, :, stop:] = math.nan
            past_value[:, :, stop:] = math.nan
        common = (rows_of(case.bias, start, stop), seed)
        constants = (start, case.causal, SCALE, dropout_p)
        chunk = query[:, :, start:stop]
        out, logsumexp = streambp.attention_chunk(chunk, past_key, past_value, *common, *constants)
        operands = (grad_out[:, :, start:stop], chunk, past_key, past_value, *common)
        grad_queries.append(
            streambp.attention_chunk_backward(
                *operands, out, logsumexp, grad_key, grad_value, *constants
            )
        )
        outs.append(out)
    return torch.cat(outs[::-1], 2), torch.cat(grad_queries[::-1], 2), grad_key, grad_value


def assert_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=atol)


def check_against_sdpa(case: Case, sizes: tuple[int, ...], atol: float = 1e-12) -> None:
    reference = case.reference()
    grad_out = torch.randn(reference.shape, dtype=reference.dtype)
    expected = (reference, *torch.autograd.grad(reference, case.operands(), grad_out))
    out, _ = streambp.attention(*case.operands(), case.bias, None, case.causal, SCALE, 0.0)
    whole = (out, *torch.autograd.grad(out, case.operands(), grad_out))
    assert_equal(whole, expected, atol)
    for size in sizes:
        assert_equal(run_chunked(case, grad_out, size), expected, atol)


SIZES = (23, 12, 8, 4, 1)
TILINGS = [2048, 5]


def set_tiling(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Tiles of that many keys; unless it is the default, of few rows and little bias as well."""
    monkeypatch.setattr(attention_engines, "_KEYS", keys)
    if keys != TILINGS[0]:
        monkeypatch.setattr(attention_engines, "_SCORES", 200)
        monkeypatch.setattr(attention_engines, "_BIAS", 30)


def padding(batch: int, length: int) -> Tensor:
    """Left padding: the first rows of all but the first sequence have no key under causality."""
    padded = torch.arange(batch)[:, None] * 3
    return (torch.arange(length) >= padded)[:, None, None, :]


BIASES = {
    "none": lambda b, h, t: None,
    "random_bool": lambda b, h, t: torch.rand(b, 1, t, t) > 0.3,
    "left_padding": lambda b, h, t: padding(b, t),
    "some_rows_see_nothing": lambda b, h, t: torch.rand(b, h, t, 1) > 0.3,
    "two_dims": lambda b, h, t: torch.rand(t, t) > 0.3,
    "three_dims": lambda b, h, t: torch.randn(h, t, t, dtype=torch.float64),
    "alibi": lambda b, h, t: (
        -torch.arange(1, h + 1)[:, None, None]
        * (torch.arange(t)[:, None] - torch.arange(t)).abs().double()
    ),
    "additive_inf_padding": lambda b, h, t: torch.zeros(
        b, 1, t, t, dtype=torch.float64
    ).masked_fill(~padding(b, t), -math.inf),
    "additive_finite_padding": lambda b, h, t: torch.zeros(
        b, 1, 1, t, dtype=torch.float64
    ).masked_fill(~padding(b, t), torch.finfo(torch.float64).min),
    "additive_float32_fill": lambda b, h, t: torch.zeros(
        b, 1, t, t, dtype=torch.float64
    ).masked_fill(~padding(b, t) | torch.ones(t, t).triu(1).bool(), torch.finfo(torch.float32).min),
}

"""What the attention kernels of CUDA are handed, by stand-ins that read memory as they do.

A stand-in computes what its kernel does from the bytes that the kernel would read: where a kernel
takes an operand's strides from its sizes, so does the stand-in. It refuses what the kernel refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streambp_fx.ops import attention_engines, attention_kernels
from tests.attention_cases import BIASES, SCALE, Case, assert_equal, make_case, rows_of, set_tiling

streambp = torch.ops.streambp
ROWS = 72
CHUNKS = (32, ROWS)
"""The log-sum-exp of 32 rows needs no padding; that of 8 rows, and of 72, does."""


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, lower_right: bool, scale: float
) -> Tensor:
    """Scores ``[B, H, L, S]`` of operands ``[B, L, H, E]``, in float64."""
    scores = torch.einsum("blhe,bshe->bhls", query.double(), key.double()) * scale
    if bias is not None:
        scores = scores + bias.double()
    if lower_right:
        rows, keys = scores.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _forward(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Out ``[B, L, H, E]`` and the log-sum-exp, which kernels say is finite in rows without key."""
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    weights = (scores - logsumexp[..., None]).exp()
    out = torch.einsum("bhls,bshe->blhe", weights, value.double())
    return out.to(query.dtype).contiguous(), logsumexp.float()


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scores: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = grad_out.double(), out.double()
    weights = (scores - logsumexp[..., None].double()).exp()
    delta = (grad * out).sum(-1).transpose(1, 2)[..., None]
    slopes = weights * (torch.einsum("blhe,bshe->bhls", grad, value.double()) - delta) * scale
    results = (
        torch.einsum("bhls,bshe->blhe", slopes, key.double()),
        torch.einsum("bhls,blhe->bshe", slopes, query.double()),
        torch.einsum("bhls,blhe->bshe", weights, grad),
    )
    grad_query, grad_key, grad_value = (one.to(query.dtype) for one in results)
    return grad_query, grad_key, grad_value


def _as_contiguous(tensor: Tensor) -> Tensor:
    """The elements at the strides that a contiguous tensor of these sizes has."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def _elements_are_adjacent(*tensors: Tensor) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _rows_are_aligned(bias: Tensor | None) -> bool:
    """Whether each row of a bias begins at a multiple of 16 bytes of 2 byte elements."""
    return bias is None or (
        bias.stride(-1) == 1 and not any(stride % 8 for stride in bias.stride()[:-1])
    )


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *others: Any,
    scale: float,
) -> tuple[Tensor, Tensor]:
    assert query.shape[2] == key.shape[2] == value.shape[2], "it knows no groups"
    assert _elements_are_adjacent(query, key, value) and _rows_are_aligned(bias)
    kind = others[5]
    out, logsumexp = _forward(query, key, value, _scores(query, key, bias, kind == 2, scale))
    rows = query.shape[1]
    padded = torch.full((*logsumexp.shape[:2], rows + -rows % 32), math.nan)
    padded[..., :rows] = logsumexp
    return out, padded


def _efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *others: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, None]:
    assert query.shape[2] == key.shape[2] == value.shape[2], "it knows no groups"
    assert _elements_are_adjacent(query, key, value) and _rows_are_aligned(bias)
    logsumexp, kind = others[4], others[8]
    rows = query.shape[1]
    assert logsumexp.shape[-1] == rows + -rows % 32 and logsumexp.dtype == torch.float32
    scores = _scores(query, key, bias, kind == 2, scale)
    logsumexp = _as_contiguous(logsumexp)
    assert (logsumexp[..., rows:] == math.inf).all(), "rows of padding would add to keys"
    out = _as_contiguous(out)
    gradients = _backward(grad_out, query, key, value, out, logsumexp[..., :rows], scores, scale)
    return (*gradients, None)


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float
) -> tuple[Tensor, Tensor]:
    assert _elements_are_adjacent(query, key, value)
    key, value = (_ungrouped(one, query) for one in (key, value))
    return _forward(query, key, value, _scores(query, key, None, others[5], scale))


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # The op itself makes `grad_out` and `out` contiguous.
    assert _elements_are_adjacent(query, key, value)
    assert logsumexp.shape[-1] == query.shape[1] and logsumexp.dtype == torch.float32
    many = [_ungrouped(one, query) for one in (key, value)]
    scores = _scores(query, many[0], None, others[5], scale)
    logsumexp = _as_contiguous(logsumexp)
    gradients = _backward(grad_out, query, *many, out, logsumexp, scores, scale)
    groups = key.shape[2]
    return (gradients[0], *(one.unflatten(2, (groups, -1)).sum(3) for one in gradients[1:]))  # type: ignore[return-value]


def _ungrouped(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[2] // tensor.shape[2], 2)


STAND_INS = {
    "_efficient_attention_forward": _efficient_forward,
    "_efficient_attention_backward": _efficient_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
}
KERNELS = {"flash": attention_kernels._FLASH, "efficient": attention_kernels._EFFICIENT}


@pytest.fixture(params=[2048, 5], ids=["one_tile", "many_tiles"])
def stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in STAND_INS.items():
        monkeypatch.setattr(torch.ops.aten, name, function)
    set_tiling(monkeypatch, request.param)


def _rows_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _rows_apart(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -2).contiguous().transpose(0, -2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows_first": _rows_first,
    "heads_first": Tensor.contiguous,
    "batch_inside": _rows_apart,
}


def _run_chunked(
    case: Case, grad_out: Tensor, size: int, layout: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Out and gradients; what a chunk's backward gets of its forward lies in memory as told."""
    query, key, value = (operand.detach() for operand in case.operands())
    grad_key, grad_value = (torch.zeros_like(one, dtype=torch.float32) for one in (key, value))
    outs, grad_queries = [], []
    for start in reversed(range(0, ROWS, size)):
        rows = slice(start, start + size)
        bias = rows_of(case.bias, start, min(start + size, ROWS))
        constants = (start, case.causal, SCALE, 0.0)
        chunk = query[:, :, rows]
        out, logsumexp = streambp.attention_chunk(chunk, key, value, bias, None, *constants)
        operands = (layout(grad_out[:, :, rows]), layout(chunk), layout(key), layout(value))
        saved = (layout(out), logsumexp.transpose(1, 2).contiguous().transpose(1, 2))
        grad_queries.append(
            streambp.attention_chunk_backward(
                *operands, bias, None, *saved, grad_key, grad_value, *constants
            )
        )
        outs.append(out)
    return torch.cat(outs[::-1], 2), torch.cat(grad_queries[::-1], 2), grad_key, grad_value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", CHUNKS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "kernel, bias", [("flash", "none"), *(("efficient", name) for name in ("none", "two_dims"))]
)
def test_kernels_are_right_whatever_lies_where_in_memory(
    stand_ins: None,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    bias: str,
    causal: bool,
    size: int,
    layout: str,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(attention_engines, "kernel_for", lambda *_: KERNELS[kernel])
    made = BIASES[bias](2, 4, ROWS)
    if made is not None:
        # Elements of a row that are not adjacent, as those of a transposed bias.
        made = torch.randn(ROWS, ROWS).masked_fill(~made, -math.inf).mT.contiguous().mT
    case = make_case(queries=ROWS, bias=made, causal=causal, dtype=torch.float32)
    want = case.reference()
    grad_out = torch.randn(want.shape)
    expected = (want, *torch.autograd.grad(want, case.operands(), grad_out))
    assert_equal(_run_chunked(case, grad_out, size, LAYOUTS[layout]), expected, 1e-5)

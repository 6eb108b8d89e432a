"""Streaming in narrow dtypes errs no more than eager in the same dtype, for any chunk count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend import needs_report, streamed
from tests.marks import slow_but
from tests.models import build, loss_of, make_batch
from tests.oracle import assert_error_not_larger_than_eager, assert_same_grads, run

NAMES = ["nanogpt", "llama"]
ALL_NAMES = slow_but(NAMES, [*NAMES, "gpt2", "gptneox", "gemma", "trilgpt", "cohere"])
CHUNK = 8


def _build(name: str) -> Callable[[int], nn.Module]:
    return lambda seed: build(name, seed=seed)


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_in_one_dtype(name: str, dtype: torch.dtype) -> None:
    assert_error_not_larger_than_eager(_build(name), dtype, chunk_size=CHUNK)


@pytest.mark.parametrize("name", slow_but(["nanogpt"], NAMES))
def test_float16_weights_with_a_scaled_loss(name: str) -> None:
    assert_error_not_larger_than_eager(_build(name), torch.float16, scale=1024.0, chunk_size=CHUNK)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_bfloat16_autocast_over_float32_weights(name: str) -> None:
    assert_error_not_larger_than_eager(
        _build(name), torch.float32, autocast=torch.bfloat16, chunk_size=CHUNK
    )


@pytest.mark.parametrize("name", slow_but(["llama"], NAMES))
def test_float16_autocast_with_a_scaled_loss(name: str) -> None:
    assert_error_not_larger_than_eager(
        _build(name),
        torch.float32,
        autocast=torch.float16,
        scale=2.0**14,
        chunk_size=CHUNK,
    )


def test_gradient_scaler_steps_as_in_eager() -> None:
    """A whole `torch.amp.GradScaler` step: scale, backward, unscale, clip, step, update."""

    def train(compiled: bool) -> tuple[dict[str, Tensor], float]:
        model = build("llama")
        start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        function = streamed(model, chunk_size=CHUNK) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(function(**make_batch(2, 64)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved = {n: (w - start[n]).detach() for n, w in model.named_parameters()}
        return moved, scaler.get_scale()

    got, scale = train(compiled=True)
    want, right_scale = train(compiled=False)
    assert scale == right_scale
    assert_same_grads(got, want, 2e-2, floor=0.1)


class Head(nn.Module):
    """A head on features that need no gradient: ``forward(x, labels) -> loss``."""

    def __init__(self, vocab: int = 512, hidden: int = 64, upcast: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, hidden) / 8)
        self.upcast = upcast

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = x @ self.weight.mT
        return F.cross_entropy(logits.float() if self.upcast else logits, labels)


def _head_error(chunk: int, **options: Any) -> float:
    """Relative error of the head's bfloat16 gradient over 4096 tokens; ``chunk`` 0 is eager."""
    torch.manual_seed(0)
    head = Head().bfloat16()
    x = torch.randn(4096, 64).bfloat16()
    labels = torch.randint(512, (4096,))
    exact = run(head.double(), {"x": x.double(), "labels": labels}).grads["weight"]
    head = head.bfloat16()
    function = streamed(head, chunk_size=chunk, **options) if chunk else None
    got = run(head, {"x": x, "labels": labels}, function).grads["weight"]
    assert got is not None and exact is not None
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_error_of_weight_gradient_does_not_grow_with_chunk_count() -> None:
    eager = _head_error(0)
    for chunk in (4096, 512, 64, 16):
        assert _head_error(chunk) <= 1.1 * eager, f"chunk {chunk}"


@needs_report
def test_sums_in_bfloat16_are_worse_so_the_option_matters() -> None:
    narrow = _head_error(16, accumulation_dtype=None)
    assert narrow > 1.5 * _head_error(16)


@pytest.mark.parametrize("upcast", [True, False])
def test_upcast_of_logits_is_kept_as_written(upcast: bool) -> None:
    """The loss has the program's dtype and value, which differ with the cast and without."""
    torch.manual_seed(0)
    head = Head(upcast=upcast).bfloat16()
    batch = {"x": torch.randn(64, 64).bfloat16() * 3, "labels": torch.randint(512, (64,))}
    want = run(head, batch)
    got = run(head, batch, streamed(head, chunk_size=16))
    assert got.loss.dtype == want.loss.dtype == (torch.float32 if upcast else torch.bfloat16)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6 if upcast else 1e-2, atol=0)


def test_step_is_bitwise_repeatable() -> None:
    model = build("llama")
    batch = make_batch(2, 50)
    function = streamed(model, chunk_size=CHUNK)
    first, second = run(model, batch, function), run(model, batch, function)
    assert torch.equal(first.loss, second.loss)
    for name, grad in first.grads.items():
        again = second.grads[name]
        assert grad is not None and again is not None and torch.equal(grad, again), name

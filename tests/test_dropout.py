"""Dropout: one mask per seed, the same in forward and backward and for every chunking.

Eager's own random stream is not asked for. The oracle is the loss itself: with a fixed seed it is a
smooth function of the weights, whose slope the gradients must give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend import needs_report, streamed
from tests.models import Batch, build, loss_of, make_batch, make_dtype_preserving
from tests.oracle import Step, assert_same_step, run
from tests.own_models import NanoGPT

LENGTH = 14
MODELS = ["feed_forward", "attention", "gpt2_dropout"]


def _model(name: str) -> Any:
    if name == "gpt2_dropout":
        return make_dtype_preserving(build(name))
    torch.manual_seed(0)
    model: Any = NanoGPT(dropout=0.3).double()
    for block in model.blocks:
        if name == "attention":
            block.dropout.p = 0.0
        else:
            block.attention.dropout = 0.0
    return model


def _seeded(seed: int) -> Callable[[Callable[..., Any], Batch], Tensor]:
    def loss(function: Callable[..., Any], batch: Batch) -> Tensor:
        torch.manual_seed(seed)
        return loss_of(function(**batch))

    return loss


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    model, batch = _model(name), make_batch(2, LENGTH)
    function = streamed(model, chunk_size=4)
    grads = run(model, batch, function, loss=_seeded(3)).grads
    torch.manual_seed(1)
    direction = [torch.randn_like(weight) for weight in model.parameters()]
    slope = sum(
        (grad * d).sum().item()
        for grad, d in zip(grads.values(), direction, strict=True)
        if grad is not None
    )
    step = 1e-5

    def shifted(by: float) -> float:
        with torch.no_grad():
            for weight, d in zip(model.parameters(), direction, strict=True):
                weight.add_(by * d)
        # With gradients on, so that the very same compiled forward runs.
        value = _seeded(3)(function, batch).item()
        with torch.no_grad():
            for weight, d in zip(model.parameters(), direction, strict=True):
                weight.sub_(by * d)
        return value

    measured = (shifted(step) - shifted(-step)) / (2 * step)
    assert measured == pytest.approx(slope, rel=1e-5)


@needs_report
@pytest.mark.parametrize("name", MODELS)
def test_mask_is_the_same_for_every_chunking(name: str) -> None:
    model, batch = _model(name), make_batch(2, LENGTH)

    def step(chunk: int) -> Step:
        return run(model, batch, streamed(model, chunk_size=chunk), loss=_seeded(3))

    whole = step(LENGTH)
    for chunk in (1, 2, 4, 7, 50):
        assert_same_step(step(chunk), whole)


def test_compiled_bodies_draw_the_numbers_of_their_plans() -> None:
    torch.manual_seed(0)
    model, batch = NanoGPT(1, dropout=0.3).double(), make_batch(2, LENGTH)
    as_planned, compiled = (
        run(model, batch, streamed(model, chunk_size=4, compile_bodies=chosen), loss=_seeded(3))
        for chosen in (False, True)
    )
    assert_same_step(compiled, as_planned)


@pytest.mark.parametrize("name", MODELS)
def test_seed_decides_the_mask(name: str) -> None:
    model, batch = _model(name), make_batch(2, LENGTH)
    function = streamed(model, chunk_size=4)
    first, again, other = (run(model, batch, function, loss=_seeded(s)).loss for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Kept(nn.Module):
    """What dropout leaves of ones, summed over ``[batch, sequence]`` for each hidden unit."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.float64))
        self.dropout = nn.Dropout(p)

    def forward(self, ids: Tensor) -> Tensor:
        ones = (ids * 0 + 1)[..., None] * self.weight
        return self.dropout(ones).sum()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_share_that_is_dropped(p: float) -> None:
    model = Kept(p)
    ids = torch.randint(9, (2, 400))
    torch.manual_seed(0)
    loss = streamed(model, chunk_size=64)(ids)
    loss.backward()
    count = ids.numel()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.sum(), loss.detach())
    # Each kept one counts 1 / (1 - p), so that the expected sum is that of all ones.
    kept = loss.item() / (64 * count)
    assert kept == pytest.approx(0.0 if p == 1.0 else 1.0, abs=0.03)
    # Independent draws for each unit: their sums differ, but not by much.
    spread = model.weight.grad.std().item()
    expected = 0.0 if p in (0.0, 1.0) else (count * p / (1 - p)) ** 0.5
    assert spread == pytest.approx(expected, rel=0.4, abs=1e-9)


def test_dropout_is_off_in_evaluation() -> None:
    model, batch = _model("gpt2_dropout").eval(), make_batch(2, LENGTH)
    got = run(model, batch, streamed(model, chunk_size=4))
    assert_same_step(got, run(model, batch))

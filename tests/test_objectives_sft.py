"""Supervised objectives that a user writes in Python: exact, and without logits of a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend import needs_report, streamed
from tests.marks import slow_but
from tests.models import make_dtype_preserving
from tests.objectives import (
    CHUNK,
    VOCAB,
    Objective,
    Policy,
    check,
    noise,
    policy,
    run,
    sft_batch,
)
from tests.oracle import assert_same_step


def _shifted(model: Policy, ids: Tensor, attention: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Logits ``[B, T - 1, V]``, targets ``[B, T - 1]`` and which of them count."""
    targets = labels[:, 1:]
    return model(ids, attention)[:, :-1], targets, targets != -100


def _cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), **options)


def token_mean(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets)


def token_sum(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets, reduction="sum")


def none_times_mask(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, counted = _shifted(model, **batch)
    each = F.cross_entropy(logits.mT, targets.clamp(min=0), reduction="none")
    return (each * counted).sum() / counted.sum()


def none_times_mask_in_rows(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, counted = _shifted(model, **batch)
    each = _cross_entropy(logits, targets.clamp(min=0), reduction="none").view_as(targets)
    return ((each * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def given_number_of_items(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets, reduction="sum") / torch.tensor(77)


def padded_shift(model: Policy, ids: Tensor, attention: Tensor, labels: Tensor) -> Tensor:
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(model(ids, attention).view(-1, VOCAB), targets.view(-1))


def other_ignore_index(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, counted = _shifted(model, **batch)
    return _cross_entropy(logits, torch.where(counted, targets, 7), ignore_index=7)


def label_smoothing(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets, label_smoothing=0.1)


def z_loss(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, counted = _shifted(model, **batch)
    squares = (torch.logsumexp(logits, -1).square() * counted).sum() / counted.sum()
    return _cross_entropy(logits, targets) + 1e-2 * squares


def class_weights(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    weight = torch.linspace(0.5, 2, VOCAB, dtype=logits.dtype)
    return _cross_entropy(logits, targets, weight=weight)


def class_weights_and_smoothing(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    weight = torch.linspace(0.5, 2, VOCAB, dtype=logits.dtype)
    return _cross_entropy(logits, targets, weight=weight, label_smoothing=0.1)


def gathered_log_softmax(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, counted = _shifted(model, **batch)
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -(chosen * counted).sum() / counted.sum()


def one_hot_targets(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, counted = _shifted(model, **batch)
    one_hot = F.one_hot(targets.clamp(min=0), VOCAB)
    return -((logits.log_softmax(-1) * one_hot).sum(-1) * counted).sum() / counted.sum()


def focal(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    each = _cross_entropy(logits, targets, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def _capped(logits: Tensor) -> Tensor:
    return 3 * torch.tanh(logits / 3)


def soft_cap(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(_capped(logits), targets)


def scale_and_temperature(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(0.7 * logits / 1.3, targets)


def trained_bias(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(_capped(logits + model.extra), targets)


def second_loss_of_features(
    model: Policy, ids: Tensor, attention: Tensor, labels: Tensor
) -> Tensor:
    x = model.features(ids, attention)
    lm = _cross_entropy(model.head(x)[:, :-1], labels[:, 1:])
    return lm + 0.3 * x.square().mean() + 0.1 * model.value(x).tanh().mean()


def second_loss_of_logits(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets) + 1e-3 * logits.square().mean()


OBJECTIVES: list[Objective] = [
    token_mean,
    token_sum,
    none_times_mask,
    none_times_mask_in_rows,
    given_number_of_items,
    padded_shift,
    other_ignore_index,
    label_smoothing,
    z_loss,
    class_weights,
    class_weights_and_smoothing,
    gathered_log_softmax,
    one_hot_targets,
    focal,
    soft_cap,
    scale_and_temperature,
    trained_bias,
    second_loss_of_features,
    second_loss_of_logits,
]
LESS_COMMON = {other_ignore_index, class_weights_and_smoothing, focal, none_times_mask_in_rows}
IN_ONE_ROW = {padded_shift, z_loss, soft_cap, one_hot_targets}


@pytest.mark.parametrize(
    "objective, rows",
    slow_but(
        [(o, 1 if o in IN_ONE_ROW else 4) for o in OBJECTIVES if o not in LESS_COMMON],
        [(o, rows) for o in OBJECTIVES for rows in (1, 4)],
    ),
)
def test_supervised_objective(objective: Objective, rows: int) -> None:
    """No token's gradient waits for a sum over tokens, so the head is one loop in all of them."""
    model = policy(bias=rows == 1)
    model.extra = nn.Parameter(noise(VOCAB))
    check(objective, (model,), sft_batch(rows), logits_rows=rows, fused=True)


class Upcast(nn.Module):
    """Cross entropy of logits that are cast to float32, as most training code does."""

    def forward(self, model: Policy, **batch: Tensor) -> Tensor:
        logits, targets, _ = _shifted(model, **batch)
        return _cross_entropy(logits.float(), targets)


def test_logits_that_are_cast_to_float() -> None:
    objective = make_dtype_preserving(Upcast())
    check(objective, (policy(),), sft_batch(4), logits_rows=4, fused=True)


def two_losses(model: Policy, **batch: Tensor) -> tuple[Tensor, Tensor]:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets), logits.square().mean()


def test_second_scalar_that_is_returned_beside_the_loss() -> None:
    def both(model: Policy, **batch: Tensor) -> Tensor:
        first, second = compiled(model, **batch)
        return 2 * first - 0.3 * second

    model, batch = policy(), sft_batch(4)
    compiled: Any = two_losses
    want = run(both, (model,), batch)
    compiled = streamed(two_losses, chunk_size=CHUNK)
    assert_same_step(run(both, (model,), batch), want)


def sorted_over_time(model: Policy, **batch: Tensor) -> Tensor:
    logits, targets, _ = _shifted(model, **batch)
    return _cross_entropy(logits, targets) + logits.sort(1).values[:, ::2].mean()


@needs_report
def test_objective_that_needs_all_logits_is_reported_at_its_line() -> None:
    report = check(sorted_over_time, (policy(),), sft_batch(4), logits_rows=4, barriers=True)
    (barrier,) = report.barriers
    assert "sort" in barrier.op and "logits.sort(1)" in barrier.source
    assert __file__ in barrier.source


@pytest.mark.parametrize("chunk", slow_but([85], [1, 7, 85, 200]))
def test_chunks_of_any_size(chunk: int) -> None:
    model, batch = policy(layers=2), sft_batch(2)
    want = check(token_mean, (model,), batch, logits_rows=200, chunk=chunk)
    assert want is None or want.head_fused

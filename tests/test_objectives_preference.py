"""Preference objectives that a user writes in Python: exact, and without logits of a sequence.

A token's gradient depends on sums over its sequence and over the one it is compared with, so the
logits of a chunk are computed once more in backward: the head is not one loop.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend import needs_report
from tests.marks import slow_but
from tests.objectives import (
    LENGTH,
    VOCAB,
    Batch,
    Objective,
    Policy,
    check,
    completion_masks,
    policy,
    token_ids,
)

BETA = 0.1


def _token_log_probs(model: Policy, ids: Tensor, attention: Tensor) -> Tensor:
    logits = model(ids, attention)[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def _log_probs(
    model: Policy, ids: Tensor, attention: Tensor, completion: Tensor, average: bool = False
) -> Tensor:
    """The sums (or means) over completions of token log-probabilities, ``[B]``."""
    mask = completion[:, 1:]
    total = (_token_log_probs(model, ids, attention) * mask).sum(-1)
    return total / mask.sum(-1) if average else total


def _sigmoid(margin: Tensor) -> Tensor:
    return -F.logsigmoid(BETA * margin).mean()


def _smoothed(margin: Tensor) -> Tensor:
    return -0.9 * F.logsigmoid(BETA * margin).mean() - 0.1 * F.logsigmoid(-BETA * margin).mean()


def _ipo(margin: Tensor) -> Tensor:
    return (margin - 1 / (2 * BETA)).square().mean()


def _hinge(margin: Tensor) -> Tensor:
    return torch.relu(1 - BETA * margin).mean()


def _dpo(loss: Callable[[Tensor], Tensor], average: bool = False) -> Objective:
    """Chosen and rejected in one batch; the reference runs inside the compiled function."""

    def objective(model: Policy, reference: Policy, **batch: Tensor) -> Tensor:
        with torch.no_grad():
            chosen_ref, rejected_ref = _log_probs(reference, **batch, average=average).chunk(2)
        chosen, rejected = _log_probs(model, **batch, average=average).chunk(2)
        return loss((chosen - rejected) - (chosen_ref - rejected_ref))

    return objective


def reference_after_policy(model: Policy, reference: Policy, **batch: Tensor) -> Tensor:
    chosen, rejected = _log_probs(model, **batch).chunk(2)
    with torch.no_grad():
        chosen_ref, rejected_ref = _log_probs(reference, **batch).chunk(2)
    return _sigmoid((chosen - rejected) - (chosen_ref - rejected_ref))


def two_calls(model: Policy, reference: Policy, **batch: Tensor) -> Tensor:
    better, worse = _halves(batch)
    margin = _log_probs(model, **better) - _log_probs(model, **worse)
    with torch.no_grad():
        reference_margin = _log_probs(reference, **better) - _log_probs(reference, **worse)
    return _sigmoid(margin - reference_margin)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    pairs = {name: value.chunk(2) for name, value in batch.items()}
    return {n: v[0] for n, v in pairs.items()}, {n: v[1] for n, v in pairs.items()}


def given_reference(model: Policy, ids: Tensor, attention: Tensor, completion: Tensor) -> Tensor:
    """The reference's log-probabilities are data."""
    reference = torch.linspace(-400, -350, len(ids), dtype=torch.float64)
    chosen, rejected = (_log_probs(model, ids, attention, completion) - reference).chunk(2)
    return _sigmoid(chosen - rejected)


def reference_free(model: Policy, **batch: Tensor) -> Tensor:
    chosen, rejected = _log_probs(model, **batch).chunk(2)
    return _sigmoid(chosen - rejected)


def gathered_minus_logsumexp(
    model: Policy, ids: Tensor, attention: Tensor, completion: Tensor
) -> Tensor:
    logits = model(ids, attention)[:, :-1]
    chosen = logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
    better, worse = (chosen * completion[:, 1:]).sum(-1).chunk(2)
    return _sigmoid(better - worse)


def negated_cross_entropy(
    model: Policy, ids: Tensor, attention: Tensor, completion: Tensor
) -> Tensor:
    logits = model(ids, attention)[:, :-1]
    each = -F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    better, worse = torch.where(completion[:, 1:].bool(), each, 0.0).sum(-1).chunk(2)
    return _sigmoid(better - worse)


def orpo(model: Policy, ids: Tensor, attention: Tensor, completion: Tensor) -> Tensor:
    logits, targets, mask = model(ids, attention)[:, :-1], ids[:, 1:], completion[:, 1:]
    each = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    chosen, rejected = ((each * mask).sum(-1) / mask.sum(-1)).chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    rows = len(ids) // 2
    labels = targets[:rows].masked_fill(mask[:rows] == 0, -100)
    nll = F.cross_entropy(logits[:rows].reshape(-1, VOCAB), labels.reshape(-1))
    return nll - 0.1 * F.logsigmoid(odds).mean()


def simpo(model: Policy, **batch: Tensor) -> Tensor:
    chosen, rejected = _log_probs(model, **batch, average=True).chunk(2)
    return -F.logsigmoid(2 * (chosen - rejected) - 1.0).mean()


def kto(model: Policy, reference: Policy, **batch: Tensor) -> Tensor:
    with torch.no_grad():
        before = _log_probs(reference, **batch)
    rewards = _log_probs(model, **batch) - before
    drift = rewards.mean().clamp(min=0).detach()
    chosen, rejected = rewards.chunk(2)
    good, bad = torch.sigmoid(BETA * (chosen - drift)), torch.sigmoid(BETA * (drift - rejected))
    return torch.cat([1 - good, 1 - bad]).mean()


def _batch(pairs: int) -> Batch:
    """Chosen rows, then as many rejected ones."""
    attention, completion = completion_masks(2 * pairs)
    return {"ids": token_ids(2 * pairs), "attention": attention, "completion": completion}


ONE_MODEL: list[Objective] = [
    given_reference,
    reference_free,
    gathered_minus_logsumexp,
    negated_cross_entropy,
    orpo,
    simpo,
]
TWO_MODELS: dict[str, Objective] = {
    "sigmoid": _dpo(_sigmoid),
    "smoothed": _dpo(_smoothed),
    "ipo": _dpo(_ipo, average=True),
    "hinge": _dpo(_hinge),
    "reference after policy": reference_after_policy,
    "two calls": two_calls,
    "kto": kto,
}


@pytest.mark.parametrize(
    "objective, pairs",
    slow_but(
        [(o, 1 if o is simpo else 4) for o in ONE_MODEL if o is not reference_free],
        [(o, pairs) for o in ONE_MODEL for pairs in (1, 4)],
    ),
)
def test_preference_objective_of_one_model(objective: Objective, pairs: int) -> None:
    check(objective, (policy(),), _batch(pairs), logits_rows=2 * pairs, fused=False)


@pytest.mark.parametrize(
    "name, pairs",
    slow_but(
        [("sigmoid", 1), ("reference after policy", 4), ("two calls", 2), ("kto", 4)],
        [(name, pairs) for name in TWO_MODELS for pairs in (1, 2, 4)],
    ),
)
def test_preference_objective_with_a_reference(name: str, pairs: int) -> None:
    models = (policy(0, layers=2), policy(1, layers=2).requires_grad_(False))
    rows = pairs if name == "two calls" else 2 * pairs
    check(TWO_MODELS[name], models, _batch(pairs), logits_rows=rows)


def joined_inside(
    model: Policy, chosen: Tensor, rejected: Tensor, attention: Tensor, completion: Tensor
) -> Tensor:
    ids = torch.cat([chosen, rejected])
    better, worse = _log_probs(model, ids, attention, completion).chunk(2)
    return _sigmoid(better - worse)


def test_chosen_and_rejected_are_joined_inside() -> None:
    batch = _batch(4)
    chosen, rejected = (rows.clone() for rows in batch.pop("ids").chunk(2))
    check(
        joined_inside,
        (policy(),),
        {"chosen": chosen, "rejected": rejected, **batch},
        logits_rows=8,
        fused=False,
    )


def calls_of_two_lengths(
    model: Policy, chosen: Tensor, rejected: Tensor, attention: Tensor, completion: Tensor
) -> Tensor:
    """The rejected sequences were padded to another length than the chosen ones."""
    end = rejected.shape[1]
    better, worse = _halves({"attention": attention, "completion": completion})
    worse = {name: value[:, :end] for name, value in worse.items()}
    return _sigmoid(_log_probs(model, chosen, **better) - _log_probs(model, rejected, **worse))


@needs_report
def test_calls_of_two_lengths_are_streamed_both() -> None:
    batch = _batch(2)
    chosen, rejected = (rows.clone() for rows in batch.pop("ids").chunk(2))
    batch |= {"chosen": chosen, "rejected": rejected[:, : LENGTH - 11].clone()}
    report = check(calls_of_two_lengths, (policy(),), batch, logits_rows=2)
    names = [loop.name for loop in report.loops]
    # The heads of both calls are in the last segment, with the second call's layer.
    assert sum(name.startswith("length1_") for name in names) == 2

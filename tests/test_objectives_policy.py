"""Policy-gradient and distillation objectives: exact, and without logits of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.marks import slow_but
from tests.objectives import (
    LENGTH,
    PROMPT,
    Batch,
    Objective,
    Policy,
    check,
    completion_masks,
    noise,
    policy,
    sft_batch,
    token_ids,
)

GROUP = 8
Normaliser = Callable[[Tensor, Tensor], Tensor]


def by_sequence(each: Tensor, mask: Tensor) -> Tensor:
    return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def by_token(each: Tensor, mask: Tensor) -> Tensor:
    return (each * mask).sum() / mask.sum().clamp(min=1)


def by_constant(each: Tensor, mask: Tensor) -> Tensor:
    return (each * mask).sum() / (len(each) * 64)


def _log_softmax(model: Policy, ids: Tensor, attention: Tensor) -> Tensor:
    return (model(ids, attention)[:, :-1] / 0.9).log_softmax(-1)


def _chosen(scores: Tensor, ids: Tensor) -> Tensor:
    return scores.gather(-1, ids[:, 1:, None])[..., 0]


def _clipped(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    ratio = log_ratio.exp()
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)


def _k3(reference: Tensor, new: Tensor) -> Tensor:
    return (reference - new).exp() - (reference - new) - 1


def _grpo(normalise: Normaliser) -> Objective:
    def objective(
        model: Policy,
        ids: Tensor,
        attention: Tensor,
        mask: Tensor,
        old: Tensor,
        reference: Tensor,
        advantages: Tensor,
    ) -> Tensor:
        new = _chosen(_log_softmax(model, ids, attention), ids)
        each = _clipped(new - old, advantages) + 0.04 * _k3(reference, new)
        return normalise(each, mask)

    return objective


def with_entropy(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    scores = _log_softmax(model, ids, attention)
    entropy = -(scores.exp() * scores).sum(-1)
    each = _clipped(_chosen(scores, ids) - batch["old"], batch["advantages"]) - 0.01 * entropy
    return by_token(each, batch["mask"])


def with_entropy_of_logits(
    model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor
) -> Tensor:
    logits = model(ids, attention)[:, :-1]
    log_total = logits.logsumexp(-1)
    entropy = log_total - (logits.softmax(-1) * logits).sum(-1)
    new = _chosen(logits, ids) - log_total
    each = _clipped(new - batch["old"], batch["advantages"]) - 0.01 * entropy
    return by_token(each, batch["mask"])


def by_rows(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    """Log-probabilities row by row, as trainers do to save memory."""
    logits = model(ids, attention)[:, :-1]
    rows = zip(logits, ids[:, 1:], strict=True)
    new = torch.stack([row.log_softmax(-1).gather(-1, i[:, None])[:, 0] for row, i in rows])
    return by_token(_clipped(new - batch["old"], batch["advantages"]), batch["mask"])


def log_totals_by_rows(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    logits = model(ids, attention)[:, :-1]
    new = _chosen(logits, ids) - torch.stack([row.logsumexp(-1) for row in logits])
    return by_token(_clipped(new - batch["old"], batch["advantages"]), batch["mask"])


def on_policy(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    new = _chosen(_log_softmax(model, ids, attention), ids)
    return by_token(_clipped(new - new.detach(), batch["advantages"]), batch["mask"])


def completions_alone(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    """Logits of the prompt are dropped before the loss."""
    kept = LENGTH - PROMPT
    scores = model(ids, attention)[:, :-1][:, -kept:].log_softmax(-1)
    new = scores.gather(-1, ids[:, -kept:, None])[..., 0]
    each = _clipped(new - batch["old"][:, -kept:], batch["advantages"])
    return by_token(each, batch["mask"][:, -kept:])


def sequence_ratio(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    new, mask = _chosen(_log_softmax(model, ids, attention), ids), batch["mask"]
    log_ratio = ((new - batch["old"]) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return _clipped(log_ratio[:, None], batch["advantages"]).mean()


def sequence_ratio_by_token(
    model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor
) -> Tensor:
    new, mask = _chosen(_log_softmax(model, ids, attention), ids), batch["mask"]
    log_ratio = ((new - batch["old"]) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    each = _clipped(new - new.detach() + log_ratio.detach()[:, None], batch["advantages"])
    return by_sequence(each, mask)


def value_head(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    """PPO with a clipped value loss; the advantages are given."""
    logits, values = model.with_values(ids, attention)
    new, values, mask = _chosen(logits[:, :-1].log_softmax(-1), ids), values[:, :-1], batch["mask"]
    before, returns = 0.1 * batch["reference"], 0.1 * batch["old"] + batch["advantages"][:, None]
    near = before + (values - before).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.max((values - returns).square(), (near - returns).square())
    policy_loss = _clipped(new - batch["old"], batch["advantages"])
    return by_token(policy_loss, mask) + 0.5 * by_token(value_loss, mask)


def whitened_advantages(model: Policy, ids: Tensor, attention: Tensor, **batch: Tensor) -> Tensor:
    """Advantages from the value head, brought to mean 0 and variance 1 over all tokens."""
    logits, values = model.with_values(ids, attention)
    new, values, mask = _chosen(logits[:, :-1].log_softmax(-1), ids), values[:, :-1], batch["mask"]
    raw = batch["old"] - values.detach()
    centred = raw - by_token(raw, mask)
    white = centred * torch.rsqrt(by_token(centred.square(), mask) + 1e-8)
    value_loss = by_token((values - batch["old"]).square(), mask)
    return by_token(_clipped(new - batch["old"], white), mask) + 0.5 * value_loss


def _batch(rows: int) -> Batch:
    """``rows`` completions of one prompt; one of them is empty if there are several."""
    attention, completion = completion_masks(rows)
    ids = token_ids(rows)
    ids[:, :PROMPT] = ids[0, :PROMPT].clone()
    mask = completion[:, 1:].double()
    if rows > 1:
        mask[-1] = 0
    old = -7 + noise(rows, LENGTH - 1)
    return {
        "ids": ids,
        "attention": attention,
        "mask": mask,
        "old": old,
        "reference": old + noise(rows, LENGTH - 1, seed=3),
        "advantages": noise(rows, seed=4, scale=1.0),
    }


PER_TOKEN: dict[str, Objective] = {
    "grpo": _grpo(by_sequence),
    "dapo": _grpo(by_token),
    "dr grpo": _grpo(by_constant),
    "entropy": with_entropy,
    "entropy of logits": with_entropy_of_logits,
    "by rows": by_rows,
    "log totals by rows": log_totals_by_rows,
    "on policy": on_policy,
    "completions alone": completions_alone,
    "value head": value_head,
}
BY_SEQUENCE: dict[str, Objective] = {
    "gspo": sequence_ratio,
    "gspo by token": sequence_ratio_by_token,
    "whitened advantages": whitened_advantages,
}


@pytest.mark.parametrize(
    "name, rows",
    slow_but(
        [(n, GROUP) for n in PER_TOKEN if n not in ("dr grpo", "by rows")] + [("dapo", 1)],
        [(name, rows) for name in PER_TOKEN for rows in (1, 4, GROUP)],
    ),
)
def test_policy_objective_by_token(name: str, rows: int) -> None:
    """Token gradients wait for nothing, since counts come from the mask: the head is one loop."""
    check(PER_TOKEN[name], (policy(),), _batch(rows), logits_rows=rows, fused=True)


@pytest.mark.parametrize(
    "name, rows",
    slow_but(
        [("gspo", GROUP), ("gspo by token", 1), ("whitened advantages", GROUP)],
        [(name, rows) for name in BY_SEQUENCE for rows in (1, 4, GROUP)],
    ),
)
def test_policy_objective_that_waits_for_sums_over_sequences(name: str, rows: int) -> None:
    check(BY_SEQUENCE[name], (policy(),), _batch(rows), logits_rows=rows, fused=False)


def reference_inside(
    model: Policy, frozen: Policy, ids: Tensor, attention: Tensor, **batch: Tensor
) -> Tensor:
    new = _chosen(_log_softmax(model, ids, attention), ids)
    with torch.no_grad():
        before = _chosen(_log_softmax(frozen, ids, attention), ids)
    each = _clipped(new - batch["old"], batch["advantages"]) + 0.04 * _k3(before, new)
    return by_sequence(each, batch["mask"])


def test_reference_model_inside_a_policy_loss() -> None:
    models = (policy(0), policy(1).requires_grad_(False))
    check(reference_inside, models, _batch(GROUP), logits_rows=GROUP, fused=True)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return (student.exp() * (student - teacher)).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    middle = torch.logaddexp(student, teacher) - torch.tensor(2.0, dtype=student.dtype).log()
    return (forward_kl(middle, student) + forward_kl(middle, teacher)) / 2


def library_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


def _distillation(divergence: Callable[[Tensor, Tensor], Tensor], student_first: bool) -> Objective:
    def objective(
        student: Policy, teacher: Policy, ids: Tensor, attention: Tensor, labels: Tensor
    ) -> Tensor:
        if student_first:
            logits = student(ids, attention)[:, :-1]
        with torch.no_grad():
            wanted = teacher(ids, attention)[:, :-1].log_softmax(-1)
        if not student_first:
            logits = student(ids, attention)[:, :-1]
        return by_token(divergence(logits.log_softmax(-1), wanted), labels[:, 1:] != -100)

    return objective


DIVERGENCES = [forward_kl, reverse_kl, jensen_shannon, library_kl]


@pytest.mark.parametrize(
    "divergence, student_first, rows",
    slow_but(
        [(forward_kl, False, 4), (reverse_kl, True, 1)],
        [(d, first, rows) for d in DIVERGENCES for first in (True, False) for rows in (1, 4)],
    ),
)
def test_distillation(
    divergence: Callable[[Tensor, Tensor], Tensor], student_first: bool, rows: int
) -> None:
    """Neither model's logits wait for the other's layers."""
    models = (policy(0, layers=2), policy(1, layers=2).requires_grad_(False))
    objective = _distillation(divergence, student_first)
    check(objective, models, sft_batch(rows), logits_rows=rows)

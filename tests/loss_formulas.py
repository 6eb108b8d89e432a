"""The formulas of `streambp_fx.losses`, written anew with loops over rows and tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.objectives import LENGTH, Batch

Metrics = dict[str, Tensor]
Formula = Callable[..., tuple[Tensor, Metrics]]


def _distributions(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = output if isinstance(output, Tensor) else output.logits
    return F.log_softmax(logits / temperature, -1)


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def _entropy(p: Tensor) -> Tensor:
    return -(p.exp() * p).sum()


def sft_formula(
    model: Any,
    batch: Batch,
    *,
    num_items_in_batch: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_type: str = "nll",
) -> tuple[Tensor, Metrics]:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    each, hits, entropies = [], [], []
    for row in range(len(logits)):
        for place in range(LENGTH - 1):
            label = batch["labels"][row, place + 1]
            if label == -100:
                continue
            line = logits[row, place]
            nll = F.cross_entropy(line, label)
            smoothed = F.cross_entropy(line, label, label_smoothing=label_smoothing)
            if loss_type == "dft":
                nll_weight = torch.exp(-nll.detach())
                smoothed = smoothed + (1 - label_smoothing) * (nll_weight - 1) * nll
            each.append(smoothed + z_loss * torch.logsumexp(line, -1) ** 2)
            hits.append((line.argmax() == label).float())
            entropies.append(_entropy(F.log_softmax(line, -1)))
    count = len(each) if num_items_in_batch is None else num_items_in_batch
    metrics = {"mean_token_accuracy": _mean(hits), "entropy": _mean(entropies)}
    return torch.stack(each).sum() / count, metrics


def dpo_formula(
    model: Any,
    batch: Batch,
    *,
    ref_model: Any = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reference_free: bool = False,
    average_log_prob: bool | None = None,
    simpo_gamma: float = 0.0,
) -> tuple[Tensor, Metrics]:
    average = average_log_prob or (average_log_prob is None and loss_type == "ipo")
    scores, hits, entropies = _sequence_scores(model, batch, average)
    pairs = len(scores) // 2
    reference = [torch.zeros(())] * (2 * pairs)
    if ref_model is not None:
        reference, _, _ = _sequence_scores(ref_model, batch, average)
    elif not reference_free:
        reference = [*batch["ref_chosen_logps"], *batch["ref_rejected_logps"]]
    each, chosen, rejected = [], [], []
    for pair in range(pairs):
        chosen.append(scores[pair] - reference[pair])
        rejected.append(scores[pair + pairs] - reference[pair + pairs])
        h = chosen[-1] - rejected[-1]
        p = torch.sigmoid(beta * h - simpo_gamma)
        each.append(
            {
                "sigmoid": -(1 - label_smoothing) * p.log() - label_smoothing * (1 - p).log(),
                "hinge": (1 - beta * h).clamp(min=0),
                "ipo": (h - 0.5 / beta) ** 2,
            }[loss_type]
        )
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    return _mean(each), {
        "rewards/chosen": beta * _mean(chosen),
        "rewards/rejected": beta * _mean(rejected),
        "rewards/margins": beta * _mean(margins),
        "rewards/accuracies": _mean([(margin > 0).float() for margin in margins]),
        "logps/chosen": _mean(scores[:pairs]),
        "logps/rejected": _mean(scores[pairs:]),
        "mean_token_accuracy": _mean([hit for row in hits[:pairs] for hit in row]),
        "entropy": _mean([h for row in entropies for h in row]),
    }


def _sequence_scores(model: Any, batch: Batch, average: bool) -> tuple[list[Any], ...]:
    scores, hits, entropies = [], [], []
    p, ids = _distributions(model, batch), batch["input_ids"]
    for row in range(len(ids)):
        places = [t for t in range(1, LENGTH) if batch["completion_mask"][row, t]]
        each = torch.stack([p[row, t - 1, ids[row, t]] for t in places])
        scores.append(each.mean() if average else each.sum())
        hits.append([(p[row, t - 1].argmax() == ids[row, t]).float() for t in places])
        entropies.append([_entropy(p[row, t - 1]) for t in places])
    return scores, hits, entropies


def grpo_formula(
    model: Any,
    batch: Batch,
    *,
    ref_model: Any = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    temperature: float = 1.0,
    entropy_coef: float = 0.0,
    num_items_in_batch: Any = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, Metrics]:
    high = epsilon if epsilon_high is None else epsilon_high
    p, ids = _distributions(model, batch, temperature), batch["input_ids"]
    reference = None if ref_model is None else _distributions(ref_model, batch, temperature)
    rows: list[list[Tensor]] = []
    seen: dict[str, list[Tensor]] = {}
    for row in range(len(ids)):
        places = [t for t in range(1, LENGTH) if batch["completion_mask"][row, t]]
        a = batch["advantages"][row]
        new = torch.stack([p[row, t - 1, ids[row, t]] for t in places])
        old = new.detach()
        if "old_per_token_logps" in batch:
            old = torch.stack([batch["old_per_token_logps"][row, t - 1] for t in places])
        mean = (new - old).mean()
        rows.append([])
        for index, t in enumerate(places):
            w = (mean if importance_sampling_level == "sequence" else new[index] - old[index]).exp()
            first = w * a if delta is None else w.clamp(max=delta) * a
            loss = -torch.minimum(first, w.clamp(1 - epsilon, 1 + high) * a)
            h = _entropy(p[row, t - 1])
            kl = torch.zeros(())
            if beta:
                before = batch["ref_per_token_logps"][row, t - 1]
                if reference is not None:
                    before = reference[row, t - 1, ids[row, t]]
                kl = torch.exp(before - new[index]) - (before - new[index]) - 1
            rows[-1].append(loss + beta * kl - entropy_coef * h)
            low_clip, high_clip = (w < 1 - epsilon) & (a < 0), (w > 1 + high) & (a > 0)
            for name, value in {
                "entropy": h,
                "mean_token_accuracy": p[row, t - 1].argmax() == ids[row, t],
                "clip_ratio/low_mean": low_clip,
                "clip_ratio/high_mean": high_clip,
                "clip_ratio/region_mean": low_clip | high_clip,
                **({"kl": kl} if beta else {}),
            }.items():
                seen.setdefault(name, []).append(value.double())
    every = torch.stack([value for row in rows for value in row])
    loss = {
        "grpo": _mean([torch.stack(row).mean() for row in rows]),
        "bnpo": every.mean(),
        "dapo": every.sum() / (num_items_in_batch or len(every)),
        "dr_grpo": every.sum() / (len(rows) * (max_completion_length or 1)),
    }[loss_type]
    return loss, {name: _mean(values) for name, values in seen.items()}

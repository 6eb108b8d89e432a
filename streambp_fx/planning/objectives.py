"""The step that a plan is about: a function of a model and a batch, on tensors without data.

The losses are those of `streambp_fx.losses` without their metrics: computed whole, as they are in
eager and with gradient checkpointing, metrics over the vocabulary would cost those two more than a
trainer's do. Log-probabilities of the reference are given; they are computed before the step,
without gradients, at a lower peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import next_token_logits, selected_log_probs
from .setting import Setting

Batch = dict[str, Tensor]

BETA = 0.1
CLIP = 0.2


def sft(model: Any, batch: Mapping[str, Tensor]) -> Any:
    """The model's outputs, with the loss that it computes itself from labels."""
    return model(input_ids=batch["input_ids"], labels=batch["input_ids"])


def dpo(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """``-log sigmoid(beta ((l_c - r_c) - (l_r - r_r)))`` of the sums ``l`` over tokens."""
    log_probs = _log_probs(model, batch).sum(-1)
    chosen, rejected = (log_probs - batch["reference"]).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def grpo(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The clipped loss of each token, with the divergence to a reference."""
    log_probs = _log_probs(model, batch)
    ratio = torch.exp(log_probs - log_probs.detach())
    advantages = batch["advantages"][:, None]
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    difference = batch["reference"] - log_probs
    return (BETA * (torch.exp(difference) - difference - 1) - gain).mean()


def _log_probs(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return selected_log_probs(next_token_logits(model, batch), batch["input_ids"][:, 1:])


PROGRAMS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
}


def batch_of(setting: Setting, tokens: int) -> Batch:
    """A batch for the objective's program, on the meta device: ``tokens`` in each row."""
    rows = setting.rows
    with torch.device("meta"):
        batch = {"input_ids": torch.zeros(rows, tokens, dtype=torch.int64)}
        if setting.objective == "dpo":
            batch["reference"] = torch.zeros(rows)
        if setting.objective == "grpo":
            batch["reference"] = torch.zeros(rows, tokens - 1)
            batch["advantages"] = torch.zeros(rows)
    return batch

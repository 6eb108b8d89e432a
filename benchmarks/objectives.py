"""Objectives on random batches, as steps to measure: DPO, GRPO and other ways to cross entropy.

References come with the batch, as a trainer gives them that computes them once beforehand; so the
step is that of the trained model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_fx.losses import dpo_loss, grpo_loss, sft_loss

Objective = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def linear_cross_entropy(
    model: nn.Module, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of the next token by torch's op that takes the logits in chunks.

    Raises:
        AttributeError: this torch has no such op.
    """
    body: Any = model
    hidden = body.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    labels = batch["labels"][:, 1:].flatten()
    rows = hidden[:, :-1].flatten(0, 1)
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(rows, body.lm_head.weight, labels, options=options), {}


OBJECTIVES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "sft": (sft_loss, {}),
    "dpo": (dpo_loss, {"beta": 0.1}),
    "grpo": (grpo_loss, {"beta": 0.04}),
    "linear_cross_entropy": (linear_cross_entropy, {}),
}
"""Each objective, and the options it is measured with."""

GUESSED_LOG_PROB = -10.0
"""A reference's log-probability of a token, about that of a model with random weights."""


def batch_of(objective: str, ids: Tensor) -> dict[str, Tensor]:
    """The batch that ``objective`` reads: ``ids`` (``[rows, tokens]``), and the rest made up.

    The last three quarters of each row are its completion. ``"dpo"`` takes an even number of rows.

    Raises:
        ValueError: there is no such objective, or the number of rows is odd for ``"dpo"``.
    """
    rows, tokens = ids.shape
    prompt = tokens // 4
    if objective in ("sft", "linear_cross_entropy"):
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[:, :prompt] = 0
    batch = {"input_ids": ids, "completion_mask": mask}
    if objective == "dpo":
        if rows % 2:
            raise ValueError(f"pairs need an even number of rows, got {rows}")
        total = torch.full((rows // 2,), GUESSED_LOG_PROB * (tokens - prompt), device=ids.device)
        return {**batch, "ref_chosen_logps": total, "ref_rejected_logps": total - 1.0}
    if objective == "grpo":
        each = torch.full((rows, tokens - 1), GUESSED_LOG_PROB, device=ids.device)
        advantages = torch.linspace(-1.0, 1.0, rows, device=ids.device)
        return {
            **batch,
            "advantages": advantages,
            "old_per_token_logps": each,
            "ref_per_token_logps": each,
        }
    raise ValueError(f"unknown objective {objective!r}; there are {', '.join(OBJECTIVES)}")


def objective_step(
    objective: str, model: nn.Module, call: Objective, batch: dict[str, Tensor]
) -> Callable[[], None]:
    """Forward and backward of ``call``, the objective's function as a way runs it.

    The step adds to the gradients that are there.
    """
    options = OBJECTIVES[objective][1]

    def step() -> None:
        loss, _ = call(model, batch, **options)
        loss.backward()

    return step

"""Training objectives in plain PyTorch, to call or to copy.

Each takes a model and a batch and returns ``(loss, metrics)``. They are right as they are, and
streamed when compiled::

    loss_fn = torch.compile(dpo_loss, backend="streambp")
    loss, metrics = loss_fn(model, batch, ref_model=reference, beta=0.1)

Arguments and metrics are named as in TRL. Metrics are scalar tensors without gradient, computed
from the logits of a chunk at a time, so that they cost no memory.
"""

from __future__ import annotations

from .policy import grpo_loss
from .preference import dpo_loss
from .sft import sft_loss
from .tokens import masked_mean, next_token_logits, selected_log_probs, token_entropy

__all__ = [
    "dpo_loss",
    "grpo_loss",
    "masked_mean",
    "next_token_logits",
    "selected_log_probs",
    "sft_loss",
    "token_entropy",
]

"""What all objectives are made of: next-token logits, log-probabilities, entropies and means.

Shapes: ``B`` rows, ``T`` tokens, ``V`` entries of the vocabulary. Position ``t`` of a value
``[B, T - 1]`` belongs to token ``t + 1``, which the logits at ``t`` predict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Model = Callable[..., Any]
Batch = Mapping[str, Any]

MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "use_cache")
"""The entries of a batch that the model is called with, by keyword, where the batch has them."""


def check_batch(batch: Batch, *names: str) -> None:
    """Ask for entries of a batch.

    Raises:
        ValueError: ``batch`` lacks some of ``names``.
    """
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}; it has {', '.join(batch)}")


def next_token_logits(model: Model, batch: Batch, temperature: float = 1.0) -> Tensor:
    """The logits of tokens ``1 .. T - 1``, ``[B, T - 1, V]``, divided by ``temperature``.

    Args:
        model: returns logits ``[B, T, V]``, or an object with such ``logits``.
        batch: see `MODEL_INPUTS`; ``input_ids`` is ``[B, T]``, int64.

    Returns:
        Logits in the model's dtype; bf16 and fp16 ones are cast to fp32.
    """
    output = model(**{name: batch[name] for name in MODEL_INPUTS if name in batch})
    logits = (output if isinstance(output, Tensor) else output.logits)[:, :-1]
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def selected_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """``log p(token) = logit(token) - logsumexp(logits)``, ``[B, T - 1]``.

    Args:
        logits: ``[B, T - 1, V]``.
        tokens: ``[B, T - 1]``, int64, each in ``[0, V)``.
    """
    return logits.gather(-1, tokens[..., None])[..., 0] - torch.logsumexp(logits, dim=-1)


def token_entropy(logits: Tensor) -> Tensor:
    """``H = -sum_v p_v log p_v``, in nats, ``[B, T - 1]``.

    Args:
        logits: ``[B, T - 1, V]``, finite.
    """
    # Not by softmax, whose numerator has two uses: Inductor's CPU kernels would write it out,
    # another value as large as a chunk's logits.
    log_probs = logits - torch.logsumexp(logits, dim=-1)[..., None]
    return -(torch.exp(log_probs) * log_probs).sum(-1)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean of ``values`` where ``mask`` is one, over ``dim`` or over all; 0 of nothing."""
    kept = values * mask
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)

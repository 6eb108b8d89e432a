"""Supervised fine-tuning: cross entropy of the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from .tokens import Batch, Model, check_batch, masked_mean, next_token_logits, token_entropy

SFT_LOSSES = ("nll", "dft")


def sft_loss(
    model: Model,
    batch: Batch,
    *,
    num_items_in_batch: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_type: str = "nll",
    ignore_index: int = -100,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Cross entropy of the next token, averaged over the labels that count.

    With logits ``l_t``, labels ``y_t``, ``log Z_t = logsumexp(l_t)``, ``log p_t = l_t - log Z_t``:

    .. math::
        \frac{1}{N} \sum_t \Big[ -(1 - \epsilon) \log p_t(y_t)
        - \frac{\epsilon}{V} \sum_v \log p_t(v) + \lambda \log^2 Z_t \Big]

    Sources: label smoothing (epsilon), Szegedy et al., arXiv:1512.00567, section 7; z-loss
    (lambda), Chowdhery et al., PaLM, arXiv:2204.02311, section 5. ``loss_type="dft"`` multiplies
    the first term by ``p_t(y_t)`` without its gradient: dynamic fine-tuning, Wu et al.,
    arXiv:2508.05629.

    Args:
        model: see `next_token_logits`.
        batch: the model's inputs, and ``labels`` ``[B, T]``, int64, not shifted.
        num_items_in_batch: ``N``, such as the labels of all micro-batches of a step; by default the
            labels of this batch. A tensor never compiles anew for another number.
        label_smoothing: epsilon, in ``[0, 1]``.
        z_loss: lambda.
        loss_type: ``"nll"`` or ``"dft"``.
        ignore_index: labels that do not count.

    Returns:
        The loss, and ``mean_token_accuracy`` and ``entropy`` over the labels that count.

    Raises:
        ValueError: no such ``loss_type``, or the batch lacks an entry.
    """
    if loss_type not in SFT_LOSSES:
        raise ValueError(f"loss_type is one of {SFT_LOSSES}, got {loss_type!r}")
    check_batch(batch, "input_ids", "labels")
    logits = next_token_logits(model, batch)
    labels = batch["labels"][:, 1:]
    counted = labels != ignore_index
    labels = torch.where(counted, labels, 0)
    log_total = torch.logsumexp(logits, dim=-1)
    negative = log_total - logits.gather(-1, labels[..., None])[..., 0]
    each = negative * torch.exp(-negative.detach()) if loss_type == "dft" else negative
    if label_smoothing:
        uniform = log_total - logits.mean(-1)
        each = (1 - label_smoothing) * each + label_smoothing * uniform
    if z_loss:
        each = each + z_loss * log_total.square()
    count = counted.sum() if num_items_in_batch is None else num_items_in_batch
    loss = torch.where(counted, each, 0.0).sum() / count
    with torch.no_grad():
        hits = logits.argmax(-1) == labels
        metrics = {
            "mean_token_accuracy": masked_mean(hits, counted),
            "entropy": masked_mean(token_entropy(logits), counted),
        }
    return loss, metrics

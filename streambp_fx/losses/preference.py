"""Direct preference optimisation: a chosen completion against a rejected one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .tokens import (
    Batch,
    Model,
    check_batch,
    masked_mean,
    next_token_logits,
    selected_log_probs,
    token_entropy,
)

DPO_LOSSES = ("sigmoid", "hinge", "ipo")


def dpo_loss(
    model: Model,
    batch: Batch,
    *,
    ref_model: Model | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    reference_free: bool = False,
    average_log_prob: bool | None = None,
    simpo_gamma: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Preference loss of pairs of completions, averaged over pairs.

    With ``r(y) = log pi(y | x) - log pi_ref(y | x)`` and the margin
    ``h = r(chosen) - r(rejected)``:

    .. math::
        \text{sigmoid} &: -(1 - \epsilon) \log \sigma(\beta h - \gamma)
                          - \epsilon \log \sigma(-\beta h + \gamma) \\
        \text{hinge}   &: \max(0, 1 - \beta h) \\
        \text{ipo}     &: (h - 1 / (2 \beta))^2

    Sources: sigmoid, Rafailov et al., arXiv:2305.18290, equation 7; its label smoothing (epsilon),
    Mitchell, "A note on DPO with noisy preferences", 2023; hinge, Zhao et al., SLiC-HF,
    arXiv:2305.10425, as normalised by Liu et al., RSO, arXiv:2309.06657; ipo, Azar et al.,
    arXiv:2310.12036, equation 17. ``reference_free=True, average_log_prob=True`` with
    ``simpo_gamma`` is SimPO, Meng et al., arXiv:2405.14734.

    Args:
        model: see `next_token_logits`.
        batch: the model's inputs for ``2 P`` rows, first all chosen and then all rejected ones, and
            ``completion_mask`` ``[2P, T]``, one where a token belongs to the completion. Without
            ``ref_model``, the reference's sums (or means, see ``average_log_prob``) are in
            ``ref_chosen_logps`` and ``ref_rejected_logps`` ``[P]``.
        ref_model: the reference, run without gradient.
        beta: strength of the pull to the reference.
        label_smoothing: the probability that a preference is wrong, for ``"sigmoid"``.
        loss_type: ``"sigmoid"``, ``"hinge"`` or ``"ipo"``.
        reference_free: take ``log pi_ref`` as 0.
        average_log_prob: use means over tokens in place of sums; by default for ``"ipo"`` alone.
        simpo_gamma: the target margin, for ``"sigmoid"``.

    Returns:
        The loss, and ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins`` and
        ``rewards/accuracies`` (of ``beta r``), ``logps/chosen``, ``logps/rejected``,
        ``mean_token_accuracy`` (of chosen tokens) and ``entropy``.

    Raises:
        ValueError: no such ``loss_type``, no reference, or the batch lacks an entry.
    """
    if loss_type not in DPO_LOSSES:
        raise ValueError(f"loss_type is one of {DPO_LOSSES}, got {loss_type!r}")
    check_batch(batch, "input_ids", "completion_mask")
    average = loss_type == "ipo" if average_log_prob is None else average_log_prob
    logits = next_token_logits(model, batch)
    log_probs = _completion_log_probs(logits, batch, average)
    reference = _reference_log_probs(ref_model, batch, average, reference_free, log_probs)
    chosen, rejected = (log_probs - reference).chunk(2)
    margin = chosen - rejected
    if loss_type == "sigmoid":
        gain = beta * margin - simpo_gamma
        each = -(1 - label_smoothing) * F.logsigmoid(gain) - label_smoothing * F.logsigmoid(-gain)
    elif loss_type == "hinge":
        each = torch.relu(1 - beta * margin)
    else:
        each = (margin - 1 / (2 * beta)).square()
    with torch.no_grad():
        metrics = {
            "rewards/chosen": beta * chosen.mean(),
            "rewards/rejected": beta * rejected.mean(),
            "rewards/margins": beta * margin.mean(),
            "rewards/accuracies": (margin > 0).to(margin.dtype).mean(),
            **_token_metrics(logits, log_probs, batch),
        }
    return each.mean(), metrics


def _completion_log_probs(logits: Tensor, batch: Batch, average: bool) -> Tensor:
    """``log pi(y | x)``, ``[2P]``: the sum, or mean, over the tokens of a completion."""
    mask = batch["completion_mask"][:, 1:]
    each = selected_log_probs(logits, batch["input_ids"][:, 1:])
    return masked_mean(each, mask, dim=-1) if average else (each * mask).sum(-1)


def _reference_log_probs(
    ref_model: Model | None, batch: Batch, average: bool, reference_free: bool, like: Tensor
) -> Tensor:
    if reference_free:
        return torch.zeros_like(like)
    if ref_model is not None:
        with torch.no_grad():
            return _completion_log_probs(next_token_logits(ref_model, batch), batch, average)
    if "ref_chosen_logps" not in batch or "ref_rejected_logps" not in batch:
        raise ValueError(
            "dpo_loss needs ref_model, ref_chosen_logps and ref_rejected_logps in the batch, or "
            "reference_free=True"
        )
    return torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])


def _token_metrics(logits: Tensor, log_probs: Tensor, batch: Batch) -> dict[str, Tensor]:
    tokens, mask = batch["input_ids"][:, 1:], batch["completion_mask"][:, 1:]
    pairs = tokens.shape[0] // 2
    chosen, rejected = log_probs.chunk(2)
    hits = logits.argmax(-1) == tokens
    return {
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "mean_token_accuracy": masked_mean(hits[:pairs], mask[:pairs]),
        "entropy": masked_mean(token_entropy(logits), mask),
    }

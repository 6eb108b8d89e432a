"""Group relative policy optimisation: clipped importance ratios of sampled completions."""

from __future__ import annotations

import torch
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

GRPO_LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo")
LEVELS = ("token", "sequence")


def grpo_loss(
    model: Model,
    batch: Batch,
    *,
    ref_model: Model | None = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    temperature: float = 1.0,
    entropy_coef: float = 0.0,
    num_items_in_batch: int | Tensor | None = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""Clipped policy-gradient loss of completions with given advantages.

    With the ratio ``w_t = exp(log pi(y_t) - log pi_old(y_t))`` and advantage ``A`` of a completion:

    .. math::
        \ell_t = -\min(w_t A, \text{clip}(w_t, 1 - \epsilon, 1 + \epsilon_{high}) A)
        + \beta (e^{d_t} - d_t - 1) - c H_t, \quad d_t = \log \pi_{ref}(y_t) - \log \pi(y_t)

    Sources: Shao et al., GRPO, arXiv:2402.03300, equations 3 and 4 (the last is the k3 estimate of
    the divergence to the reference); ``epsilon_high`` and the mean over tokens, Yu et al., DAPO,
    arXiv:2503.14476; the constant divisor, Liu et al., Dr. GRPO, arXiv:2503.20783; ``delta``, an
    upper bound of ``w_t`` in the unclipped term, INTELLECT-2, arXiv:2505.07291. At
    ``importance_sampling_level="sequence"`` all tokens of a completion have the ratio
    ``exp(mean_t log w_t)``: Zheng et al., GSPO, arXiv:2507.18071.

    The loss is, by ``loss_type``:

    - ``"grpo"``: the mean over completions of their means over tokens;
    - ``"bnpo"``: the mean over all tokens of the batch;
    - ``"dapo"``: the sum over ``num_items_in_batch``, by default the tokens of the batch;
    - ``"dr_grpo"``: the sum over ``B max_completion_length``.

    Args:
        model: see `next_token_logits`.
        batch: the model's inputs for prompts and completions together, ``[B, T]``;
            ``completion_mask`` ``[B, T]``; ``advantages`` ``[B]``; and, as `selected_log_probs` of
            the same tokens gives them, ``old_per_token_logps`` ``[B, T - 1]`` (without it the
            policy is its own old one) and ``ref_per_token_logps`` ``[B, T - 1]`` (read where
            ``beta`` is not 0 and there is no ``ref_model``).
        ref_model: the reference, run without gradient where ``beta`` is not 0.
        beta: weight of the divergence to the reference.
        epsilon, epsilon_high: how far the ratio may fall and rise; ``epsilon_high`` is ``epsilon``
            by default.
        delta: above ``1 + epsilon_high``; no bound by default.
        loss_type: see above.
        importance_sampling_level: ``"token"`` or ``"sequence"``.
        temperature: of sampling, by which logits are divided.
        entropy_coef: ``c``, weight of the entropy, which has a gradient then.
        num_items_in_batch: see above; a tensor never compiles anew for another number.
        max_completion_length: see above.

    Returns:
        The loss, and ``entropy``, ``mean_token_accuracy``, ``clip_ratio/low_mean``,
        ``clip_ratio/high_mean`` and ``clip_ratio/region_mean`` (the parts of tokens whose gradient
        is clipped), and ``kl`` where ``beta`` is not 0.

    Raises:
        ValueError: no such ``loss_type`` or level, or something that they need is missing.
    """
    _check_arguments(loss_type, importance_sampling_level, max_completion_length)
    check_batch(batch, "input_ids", "completion_mask", "advantages")
    tokens = batch["input_ids"][:, 1:]
    mask = batch["completion_mask"][:, 1:]
    advantages = batch["advantages"][:, None]
    logits = next_token_logits(model, batch, temperature)
    log_probs = selected_log_probs(logits, tokens)
    old = batch["old_per_token_logps"] if "old_per_token_logps" in batch else log_probs.detach()
    log_ratio = log_probs - old
    if importance_sampling_level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=-1)[:, None].expand_as(log_probs)
    ratio = torch.exp(log_ratio)
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    each = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    metrics = {}
    if beta:
        difference = _reference(ref_model, batch, temperature) - log_probs
        divergence = torch.exp(difference) - difference - 1
        each = each + beta * divergence
        metrics["kl"] = masked_mean(divergence.detach(), mask)
    entropy = token_entropy(logits if entropy_coef else logits.detach())
    if entropy_coef:
        each = each - entropy_coef * entropy
    with torch.no_grad():
        too_low = (ratio < low) & (advantages < 0)
        too_high = (ratio > high) & (advantages > 0)
        metrics |= {
            "entropy": masked_mean(entropy.detach(), mask),
            "mean_token_accuracy": masked_mean(logits.argmax(-1) == tokens, mask),
            "clip_ratio/low_mean": masked_mean(too_low, mask),
            "clip_ratio/high_mean": masked_mean(too_high, mask),
            "clip_ratio/region_mean": masked_mean(too_low | too_high, mask),
        }
    return _normalise(each, mask, loss_type, num_items_in_batch, max_completion_length), metrics


def _check_arguments(loss_type: str, level: str, max_completion_length: int | None) -> None:
    if loss_type not in GRPO_LOSSES:
        raise ValueError(f"loss_type is one of {GRPO_LOSSES}, got {loss_type!r}")
    if level not in LEVELS:
        raise ValueError(f"importance_sampling_level is one of {LEVELS}, got {level!r}")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError('loss_type="dr_grpo" needs max_completion_length')


def _reference(ref_model: Model | None, batch: Batch, temperature: float) -> Tensor:
    """The reference's log-probabilities, ``[B, T - 1]``."""
    if ref_model is not None:
        with torch.no_grad():
            logits = next_token_logits(ref_model, batch, temperature)
            return selected_log_probs(logits, batch["input_ids"][:, 1:])
    if "ref_per_token_logps" not in batch:
        raise ValueError("beta needs ref_model, or ref_per_token_logps in the batch")
    given: Tensor = batch["ref_per_token_logps"]
    return given


def _normalise(
    each: Tensor,
    mask: Tensor,
    loss_type: str,
    num_items: int | Tensor | None,
    max_completion_length: int | None,
) -> Tensor:
    if loss_type == "grpo":
        return masked_mean(each, mask, dim=-1).mean()
    if loss_type == "dr_grpo" and max_completion_length is not None:
        return (each * mask).sum() / (each.shape[0] * max_completion_length)
    if loss_type == "dapo" and num_items is not None:
        return (each * mask).sum() / num_items
    return masked_mean(each, mask)

"""Stream the trainers of TRL: ``stream(trainer)`` before ``trainer.train()``.

    trainer = SFTTrainer(model, args=args, train_dataset=data)
    streambp_fx.integrations.trl.stream(trainer)
    trainer.train()

TRL's trainers (1.16 and newer) do not read logits. They call the model with ``fused_lm_head=True``,
and a forward that TRL gave the model answers with log-probabilities, entropies and the like,
``[batch, tokens]``, which its kernel computes in tiles of 4096 tokens by 32768 words. Dynamo can
not trace that kernel, so that a compiled model would end before its head, and on CUDA the head
selects rows by a mask, whose number no compiled graph can know.

`stream` compiles that forward, TRL's own code, with the kernel's formulas written out in plain ops
over all tokens, which the backend then streams. A call without ``fused_lm_head`` (generation,
prediction with logits) runs the original forward, uncompiled. No file of TRL is changed, and no
model but the trainer's.

Activation checkpointing, which TRL turns on by default, is turned off: a streamed layer is computed
again in backward anyhow. Left on, TRL's switching it off and on around each reference or generation
step adds a hook to the embedding each time, and every new hook is a recompilation. The hook itself
makes a frozen embedding's output require a gradient, which no compiled graph can do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_KERNEL = "_ChunkedLogProbFunction"
_SELECTS_ROWS = "_use_triton"
_LOOKED_UP = {_KERNEL, _SELECTS_ROWS}
_PREPARED = "_original_forward"
"""Where accelerate keeps a model's forward once it has wrapped it for mixed precision."""

_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Two names of one training argument, of which transformers is replacing the second."""


class IntegrationError(RuntimeError):
    """The trainer is not one that this integration knows; the message says what was expected."""


class TokenStatistics(NamedTuple):
    """What TRL's kernel returns, each ``[tokens]``; ``None`` where it was not asked for.

    log_probs
        Log-probability of the target, with gradient.
    entropy
        ``-sum_v p_v log p_v``, with gradient.
    log_sum_sq_probs
        ``log sum_v p_v^2``.
    mean_logits
        Mean over the vocabulary of the logits, scaled as the probabilities are.
    is_top1
        Whether no word is likelier than the target; the first of equals counts.
    """

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


class PlainLogProbs:
    """The arithmetic of TRL's ``ChunkedLogProbFunction`` in ops that can be traced."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> TokenStatistics:
        """The statistics of ``softmax(logits)`` in fp32; the arguments are the kernel's own.

        Args:
            hidden: ``[tokens, width]``.
            weight: ``[vocabulary, width]``.
            bias: ``[vocabulary]``.
            targets: int64 ``[tokens]``.
            temperature: the logits are divided by it, last of all.
            chunk_size: the width of the kernel's tiles; of no use here.
            final_logit_softcapping: ``c`` of ``c tanh(logits / c)``.
            logit_scale: the product is multiplied by it, first of all.
            outputs: the names of the statistics that are asked for.
        """
        logits = nn.functional.linear(hidden, weight, bias).float() * logit_scale
        if final_logit_softcapping is not None:
            logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
        logits = logits * (1 / temperature)
        log_probs = logits.log_softmax(-1)
        fixed = log_probs.detach()
        return TokenStatistics(
            log_probs.gather(-1, targets[:, None]).squeeze(-1),
            -(log_probs.exp() * log_probs).sum(-1) if "entropy" in outputs else None,
            (2 * fixed).logsumexp(-1) if "log_sum_sq_probs" in outputs else None,
            logits.detach().mean(-1) if "mean_logits" in outputs else None,
            fixed.argmax(-1) == targets if "is_top1" in outputs else None,
        )


def stream(trainer: Any, *, options: Mapping[str, Any] | None = None) -> None:
    """Make the loss of ``trainer``'s model, and of its reference model, a streamed computation.

    Args:
        trainer: one of TRL's trainers that score tokens with ``fused_lm_head`` (SFT, DPO, GRPO,
            KTO, RLOO), before training.
        options: of the backend, as `torch.compile` takes them.

    Raises:
        IntegrationError: the trainer's model has no fused head of TRL.
    """
    models = [trainer.model]
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        models.append(reference)
    # All are asked for first: a trainer that is refused is left as it was.
    forwards = {model: _fused_forward(model) for model in map(_base, models)}
    for model, original in forwards.items():
        forward = MethodType(_streamed(original, dict(options or {})), model)
        if _PREPARED in vars(model):
            model._original_forward = forward
            forward = _in_mixed_precision(forward, trainer.accelerator)
        model.forward = forward
        model.disable_input_require_grads()
    for name in _CHECKPOINTING:
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, False)


def _base(model: Any) -> Any:
    """The transformers model, inside PEFT's wrapper if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _fused_forward(model: Any) -> FunctionType:
    """TRL's forward of ``model``, beneath accelerate's mixed precision if that is there already."""
    original = getattr(vars(model).get(_PREPARED, model.forward), "__func__", None)
    if not isinstance(original, FunctionType) or not _LOOKED_UP <= original.__globals__.keys():
        raise IntegrationError(
            f"the forward of {type(model).__name__} is not one with TRL's fused head: stream() is "
            "called once, on a trainer of trl>=1.16 that scores tokens (SFTTrainer, DPOTrainer, "
            "GRPOTrainer, KTOTrainer, RLOOTrainer), before training"
        )
    return original


def _in_mixed_precision(forward: MethodType, accelerator: Any) -> MethodType:
    """What accelerate makes of a forward: a reference model's is prepared with the trainer."""
    from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager

    autocast = get_mixed_precision_context_manager(
        accelerator.native_amp, accelerator.autocast_handler
    )
    return MethodType(convert_outputs_to_fp32(autocast(forward.__func__)), forward.__self__)


def _streamed(original: FunctionType, options: dict[str, Any]) -> Callable[..., Any]:
    """``original``, with what it does for ``fused_lm_head=True`` compiled."""
    traceable = _traceable(original)

    def score(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return traceable(model, *args, fused_lm_head=True, **kwargs)

    # Dynamo counts recompilations by code object: with its own, a reference model that is compiled
    # too does not use up the policy's.
    score.__code__ = score.__code__.replace()
    # Lengths differ from batch to batch; dynamic from the start is one compilation, not two.
    compiled = torch.compile(score, backend="streambp", dynamic=True, options=options)

    @functools.wraps(original)  # `generate` reads the signature
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return (compiled if fused_lm_head else original)(self, *args, **kwargs)

    return forward


def _traceable(original: FunctionType) -> FunctionType:
    """``original`` with other values for the two names, which it looks up in its module."""
    names = original.__globals__
    replaced = {**names, _KERNEL: PlainLogProbs, _SELECTS_ROWS: _selects_no_rows}
    # Dynamo looks the names of an inlined function up in the module of this name.
    del replaced["__name__"]
    copy = FunctionType(
        original.__code__, replaced, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy


def _selects_no_rows(device: torch.device) -> bool:
    return False

"""What the tests of training objectives share: a model, batches, and one check of all promises.

An objective is a plain function of a policy, perhaps a second model, and a batch. `check` runs it
eagerly and streamed in float64 and compares; it also fails where a tensor of ``rows x tokens x
vocabulary`` is allocated or a part is left unstreamed.

The sizes make that watch sharp: one *byte* for each logit is more than anything else in the step
holds (the weight gradients, a chunk's logits in float64), so that not even a boolean mask over
the logits goes unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend import BACKEND, last_report, streamed
from tests.oracle import Step, assert_same_grads
from tests.own_models import Block, FusedAttention, LogitsOnly
from tests.watch import allocations

LENGTH = 85
CHUNK = 8
VOCAB = 1024
HIDDEN = 8
HEADS = 2
PROMPT = 20

Objective = Callable[..., Any]
Batch = dict[str, Any]


class MaskedAttention(FusedAttention):
    """Causal attention that sees no padding."""

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:  # type: ignore[override]
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class Policy(LogitsOnly):
    """A causal model that takes ``input_ids`` and ``attention_mask`` and returns logits.

    ``value`` is a value head on the same features, ``extra`` a bias that an objective may add.
    """

    extra: nn.Parameter

    def __init__(self, *, layers: int = 1, vocab: int = VOCAB, bias: bool = False) -> None:
        super().__init__(layers, tied=False, vocab=vocab, hidden=HIDDEN)
        self.blocks = nn.ModuleList(
            Block(MaskedAttention(HIDDEN, HEADS), HIDDEN) for _ in range(layers)
        )
        self.head = nn.Linear(HIDDEN, vocab, bias=bias)
        self.value = nn.Linear(HIDDEN, 1)

    def features(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        allowed = (place[:, None] >= place)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        x = self.token(ids) + self.position(place)
        for block in self.blocks:
            x = x + block.attention(block.norm_1(x), allowed)
            x = x + block.down(F.gelu(block.up(block.norm_2(x))))
        return self.norm(x)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        return self.head(self.features(input_ids, attention_mask))

    def with_values(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, T, V]`` and values ``[B, T]``."""
        x = self.features(input_ids, attention_mask)
        return self.head(x), self.value(x)[..., 0]


def policy(seed: int = 0, **options: Any) -> Policy:
    """A float64 policy with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return Policy(**options).double()


def token_ids(rows: int, length: int = LENGTH, *, seed: int = 1) -> Tensor:
    """Random ids ``[rows, length]``, int64."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=draw)


def completion_masks(rows: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """``attention_mask`` and ``completion_mask``, ``[rows, length]``, int64.

    The prompts are padded on the left and the completions on the right, each row by another
    number of tokens, as in preference and policy training.
    """
    place = torch.arange(length)
    row = torch.arange(rows)[:, None]
    attention = (place >= 3 * row % PROMPT) & (place < length - 5 * row % (length // 2))
    completion = attention & (place >= PROMPT)
    return attention.long(), completion.long()


def noise(*size: int, seed: int = 2, scale: float = 0.3) -> Tensor:
    """Random numbers, float64."""
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn(size, generator=draw, dtype=torch.float64)


def sft_batch(rows: int) -> Batch:
    """Ids, a padding mask and labels of ``rows`` rows; some labels inside a row are ignored."""
    attention, _ = completion_masks(rows)
    ids = token_ids(rows)
    labels = ids.masked_fill(attention == 0, -100)
    labels[:, 30:33] = -100
    return {"ids": ids, "attention": attention, "labels": labels}


@dataclass(frozen=True)
class Outcome(Step):
    """What one step computed, with the metrics that the objective returned beside its loss."""

    metrics: dict[str, Tensor]


def run(function: Objective, models: tuple[nn.Module, ...], batch: Batch) -> Outcome:
    """Loss, the policy's gradients and metrics, with a tangent that is not one.

    Raises:
        AssertionError: a model other than the policy received a gradient.
    """
    for model in models:
        model.zero_grad(set_to_none=True)
    result = function(*models, **batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    assert not any(metric.requires_grad for metric in metrics.values())
    (loss * 0.37).backward()
    grads = {
        name: None if weight.grad is None else weight.grad.clone()
        for name, weight in models[0].named_parameters()
    }
    for other in models[1:]:
        assert all(weight.grad is None for weight in other.parameters())
    models[0].zero_grad(set_to_none=True)
    return Outcome(loss.detach().clone(), grads, metrics)


def check(
    objective: Objective,
    models: tuple[nn.Module, ...],
    batch: Batch,
    *,
    logits_rows: int,
    chunk: int = CHUNK,
    fused: bool | None = None,
    barriers: bool = False,
    **options: Any,
) -> Any:
    """Fail unless ``objective`` is streamed exactly and never holds the logits of a sequence.

    Args:
        models: the policy, then models that are only read.
        logits_rows: rows of the batch in the smallest call of a model; no allocation may reach one
            byte for each of their logits.
        fused: whether the head's backward is expected in its forward loop; ``None`` for either.
        barriers: expect a report of something left unstreamed, and watch no memory.

    Returns:
        The report.
    """
    want = run(objective, models, batch)
    function = streamed(objective, chunk_size=chunk, **options)
    got = run(function, models, batch)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(got.metrics, want.metrics, rtol=1e-11, atol=1e-13)
    assert_same_grads(got.grads, want.grads)
    if BACKEND != "streambp":
        return None
    report = last_report()
    problems = "\n".join(report.problems())
    if barriers:
        assert problems, "nothing is reported as left unstreamed"
        return report
    assert not problems, f"left unstreamed:\n{problems}"
    if fused is not None:
        assert report.head_fused == fused
    made = allocations(lambda: run(function, models, batch))
    limit = logits_rows * (LENGTH - 1) * VOCAB
    too_large = sorted((size for size in made if size >= limit), reverse=True)
    assert made and not too_large, f"{too_large} bytes allocated at once; the limit is {limit}"
    return report

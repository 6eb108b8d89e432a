"""Reported faults of preference and policy losses: the streamed loss is the program's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend import needs_report, streamed
from tests.models import VOCAB, make_batch
from tests.oracle import assert_exact_fp64
from tests.own_models import LogitsOnly
from tests.watch import assert_no_allocation_of

CHUNK = 8
LENGTH = 21


class TokenLogProbs(LogitsOnly):
    """Log-probabilities ``[batch, length - 1]`` of each next token."""

    def log_probs(self, input_ids: Tensor) -> Tensor:
        logits = self.head(self.features(input_ids))[:, :-1]
        chosen = logits.gather(-1, input_ids[:, 1:, None])[..., 0]
        return chosen - torch.logsumexp(logits, dim=-1)


class PolicyLoss(TokenLogProbs):
    """Clipped importance ratios with a divergence penalty, normalised as ``kind`` says."""

    def __init__(self, kind: str = "by token", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, old: Tensor, reference: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        new = self.log_probs(input_ids)
        ratio = torch.exp(new - old)
        if self.kind == "by sequence ratio":
            mean = ((new - old) * mask).sum(1) / mask.sum(1).clamp(min=1)
            ratio = torch.exp(mean)[:, None].expand_as(new)
        gain = torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
        difference = reference - new
        each = (0.04 * (torch.exp(difference) - difference - 1) - gain) * mask
        if self.kind == "by sequence":
            return (each.sum(1) / mask.sum(1).clamp(min=1)).mean()
        if self.kind == "by constant":
            return each.sum() / (each.shape[0] * 32)
        return each.sum() / mask.sum().clamp(min=1)


def _policy_batch(length: int = LENGTH) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = make_batch(3, length)["input_ids"]
    size = (3, length - 1)
    old = -4.9 + 0.3 * torch.randn(size, generator=draw)
    mask = torch.ones(size)
    mask[:, : length // 3] = 0  # the prompt
    mask[1, length // 2 :] = 0
    mask[2] = 0  # nothing was completed
    return {
        "input_ids": ids,
        "old": old,
        "reference": old + 0.1 * torch.randn(size, generator=draw),
        "advantage": torch.tensor([1.0, -0.7, 0.3]),
        "mask": mask,
    }


@pytest.mark.parametrize("kind", ["by token", "by sequence", "by constant", "by sequence ratio"])
def test_policy_loss_misses_ratio_or_normaliser(kind: str) -> None:
    torch.manual_seed(0)
    assert_exact_fp64(PolicyLoss(kind), _policy_batch(), chunk_size=CHUNK)


class PreferenceLoss(TokenLogProbs):
    """The logistic of the difference of two sequence sums; ``kinds`` are added to embeddings.

    Returns the loss, and the two rewards without gradient.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kind = torch.nn.Embedding(2, self.token.embedding_dim)

    def features(self, ids: Tensor) -> Tensor:
        self_ids, kinds = ids % VOCAB, ids // VOCAB
        x = self.token(self_ids) + self.position(torch.arange(ids.shape[1])) + self.kind(kinds)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, token_type_ids: Tensor, mask: Tensor, reference: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = self.head(self.features(input_ids + VOCAB * token_type_ids))[:, :-1]
        chosen = logits.gather(-1, input_ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
        sums = (chosen * mask).sum(1)
        better, worse = (sums - reference).chunk(2)
        loss = -F.logsigmoid(0.1 * (better - worse)).mean()
        return loss, torch.stack([better, worse]).detach()


def _preference_batch() -> dict[str, Tensor]:
    ids = make_batch(4, LENGTH)["input_ids"]
    mask = torch.ones(4, LENGTH - 1)
    mask[:, :6] = 0
    mask[3, 15:] = 0
    return {
        "input_ids": ids,
        "token_type_ids": (torch.arange(LENGTH) > 6).long().expand(4, LENGTH).contiguous(),
        "mask": mask,
        "reference": torch.tensor([-60.0, -70.0, -65.0, -40.0]),
    }


def _first(function: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return function(**batch)[0]


@pytest.mark.parametrize("chunk", [CHUNK, 5, 64])
def test_preference_loss_drops_extra_inputs(chunk: int) -> None:
    torch.manual_seed(0)
    assert_exact_fp64(PreferenceLoss(), _preference_batch(), loss=_first, chunk_size=chunk)


def test_preference_loss_can_not_return_rewards() -> None:
    torch.manual_seed(0)
    model = PreferenceLoss()
    batch = _preference_batch()
    loss, rewards = streamed(model, chunk_size=CHUNK)(**batch)
    loss.backward()
    torch.testing.assert_close(rewards + 0, model(**batch)[1], rtol=1e-5, atol=1e-5)


@needs_report
def test_policy_loss_builds_logits_of_the_whole_sequence() -> None:
    """The prompt is masked, but its logits count as much as the others' if they are built."""
    length = vocab = 512
    torch.manual_seed(0)
    model = PolicyLoss(layers=1, vocab=vocab)
    batch = {key: value[:1] for key, value in _policy_batch(length).items()}
    function = streamed(model, chunk_size=16)

    def step() -> None:
        function(**batch).backward()

    step()
    assert_no_allocation_of(step, length * vocab)

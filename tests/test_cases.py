"""Faults that users of chunked training reported elsewhere: losses, heads, masks and packing.

Each test is named by the fault in words. Faults of memory, of preference and policy losses, and of
saved weights are in `test_cases_memory`, `test_cases_rl` and `test_state_dict`; those of dtypes,
lengths, dropout, hooks and outputs are the subject of the test file of that name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backend import assert_streamed_whole, streamed
from tests.marks import slow_but
from tests.models import (
    Batch,
    build,
    from_transformers,
    llama_settings,
    loss_of,
    make_batch,
    make_dtype_preserving,
)
from tests.oracle import (
    assert_error_not_larger_than_eager,
    assert_exact_fp64,
    assert_same_grads,
    assert_same_step,
    run,
)
from tests.own_models import VOCAB, LogitsOnly, NanoGPT

CHUNK = 8
LENGTH = 21
PARTITIONS = [1, 3, 8, 11, 21, 64]


class PerToken(LogitsOnly):
    """Cross entropy with a ``reduction``; labels are already shifted."""

    def __init__(self, reduction: str, **options: Any) -> None:
        super().__init__(**options)
        self.reduction = reduction

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(input_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)


@pytest.mark.parametrize(
    ("reduction", "chunk"),
    slow_but(
        [("mean", 1), ("mean", 8), ("mean", 64), ("sum", 8), ("none", 8)],
        itertools.product(["mean", "sum", "none"], PARTITIONS),
    ),
)
def test_loss_grows_with_the_number_of_chunks(reduction: str, chunk: int) -> None:
    torch.manual_seed(0)
    model, batch = PerToken(reduction).double(), make_batch(2, LENGTH)
    function = streamed(model, chunk_size=chunk)
    want, got = model(**batch), function(**batch)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    # Not the same weight for each token, which would hide a permutation of them.
    upstream = torch.linspace(1, 2, want.numel(), dtype=want.dtype).reshape(want.shape)
    weights = list(model.parameters())
    left = torch.autograd.grad(got, weights, upstream)
    right = torch.autograd.grad(want, weights, upstream)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


def test_tokens_of_a_short_sample_weigh_more_than_those_of_a_long_one() -> None:
    model = make_dtype_preserving(build("llama"))
    batches = [make_batch(1, length, ignored=0.0) for length in (12, 102)]
    count = torch.tensor(11 + 101)
    merged = {
        key: torch.cat([F.pad(b[key], (0, 102 - b[key].shape[1]), value=fill) for b in batches])
        for key, fill in (("input_ids", 0), ("labels", -100))
    }
    want = run(model, {**merged, "num_items_in_batch": count}).grads
    function = streamed(model, chunk_size=16)
    model.zero_grad(set_to_none=True)
    for batch in batches:
        function(**batch, num_items_in_batch=count).loss.backward()
    assert_same_grads({name: weight.grad for name, weight in model.named_parameters()}, want)


def test_loss_with_a_token_count_is_divided_once_more() -> None:
    batch = {**make_batch(2, LENGTH), "num_items_in_batch": torch.tensor(37)}

    def quarter(function: Callable[..., Any], data: Batch) -> Tensor:
        return loss_of(function(**data)) / 4

    model = make_dtype_preserving(build("llama"))
    function = streamed(model, chunk_size=CHUNK)
    scaled, plain = run(model, batch, function, loss=quarter), run(model, batch, function)
    assert_same_grads(_times(scaled.grads, 4), plain.grads)
    assert_same_step(plain, run(model, batch))


def _times(grads: dict[str, Tensor | None], factor: float) -> dict[str, Tensor | None]:
    return {name: None if grad is None else grad * factor for name, grad in grads.items()}


@pytest.mark.parametrize("count", [None, 0, 1])
def test_batch_without_a_label_makes_a_new_nan(count: int | None) -> None:
    """Eager's mean over nothing is NaN, a sum divided by one is zero: each is kept."""
    model = make_dtype_preserving(build("llama"))
    batch = make_batch(2, LENGTH)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    if count is not None:
        batch["num_items_in_batch"] = torch.tensor(count)
    want = run(model, batch)
    got = run(model, batch, streamed(model, chunk_size=CHUNK))
    torch.testing.assert_close(
        (got.loss, got.grads), (want.loss, want.grads), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("where", [slice(0, 8), slice(8, 16), slice(16, 21), slice(0, 20)])
@pytest.mark.parametrize("name", slow_but(["nanogpt"], ["nanogpt", "llama"]))
def test_fully_masked_chunk_turns_the_batch_into_nan(name: str, where: slice) -> None:
    batch = make_batch(2, LENGTH)
    batch["labels"][:, where] = -100
    assert_exact_fp64(build(name), batch, chunk_size=CHUNK)


def test_batch_without_a_label_leaves_weights_without_gradient() -> None:
    class Clamped(LogitsOnly):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            logits = super().forward(input_ids)
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return total / (labels != -100).sum().clamp(min=1)

    torch.manual_seed(0)
    model, batch = Clamped().double(), make_batch(2, LENGTH)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    step = run(model, batch, streamed(model, chunk_size=CHUNK))
    assert step.loss.item() == 0
    for name, grad in step.grads.items():
        assert grad is not None and not grad.any(), name


class Loss(nn.Module):
    """Cross entropy of ``tanh(x)``, plus a second use of the logits."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = torch.tanh(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.pow(2).mean()


@pytest.mark.parametrize("leaf", [True, False])
def test_backward_writes_over_saved_logits(leaf: bool) -> None:
    torch.manual_seed(0)
    source = torch.randn(2, LENGTH, 13, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(13, (2, LENGTH))

    def twice(function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        x = source if leaf else source * 2
        before = x.detach().clone()
        loss = function(x, labels)
        (first,) = torch.autograd.grad(loss, source, retain_graph=True)
        (second,) = torch.autograd.grad(loss * 3, source)
        assert torch.equal(x, before)
        return first, second

    got = twice(streamed(Loss(), chunk_size=CHUNK))
    torch.testing.assert_close(got, twice(Loss()), rtol=1e-10, atol=1e-14)


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda logits: logits * 0.0625,
    "divided": lambda logits: logits / 7.0,
    "capped": lambda logits: 30.0 * torch.tanh(logits / 30.0),
    "tempered by class": lambda logits: logits * torch.linspace(0.5, 2, VOCAB, dtype=logits.dtype),
    "cut to the real vocabulary": lambda logits: logits[..., :-3],
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", slow_but([True], [True, False]))
@pytest.mark.parametrize("kind", HEADS)
def test_what_stands_between_head_and_loss_is_dropped(kind: str, bias: bool, tied: bool) -> None:
    class Headed(LogitsOnly):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            logits = HEADS[kind](super().forward(input_ids))[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten() % 100)

    torch.manual_seed(0)
    model = Headed(layers=1, tied=tied)
    if bias:
        model.head.bias = nn.Parameter(torch.randn(VOCAB))
    batch = make_batch(2, LENGTH, ignored=0.0)
    assert_exact_fp64(model, batch, chunk_size=CHUNK)


def test_soft_cap_of_logits_is_dropped() -> None:
    settings = llama_settings(head_dim=8, final_logit_softcapping=2.0)
    capped = from_transformers("Gemma2", settings, attention="eager")
    assert_exact_fp64(capped, make_batch(2, LENGTH), chunk_size=CHUNK)


def test_rows_of_ignored_targets_are_left_unwritten() -> None:
    batch = make_batch(2, 128, ignored=0.25)
    assert_exact_fp64(build("nanogpt"), batch, chunk_size=16, compile_bodies=True)


class FeedForwardOnly(NanoGPT):
    """Layers that never look at another token."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = nn.Identity()


def test_tiles_of_a_feed_forward_differ_in_bfloat16() -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return FeedForwardOnly()

    assert_error_not_larger_than_eager(make, torch.bfloat16, chunk_size=6)


def test_loss_that_is_chunked_by_hand_breaks_compilation() -> None:
    class ByHand(LogitsOnly):
        def part(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            x = self.features(input_ids)
            parts = zip(x.split(6, dim=1), labels.split(6, dim=1), strict=True)
            sums = [checkpoint(self.part, *part, use_reentrant=False) for part in parts]
            return torch.stack(sums).sum() / (labels != -100).sum()

    torch.manual_seed(0)
    assert_exact_fp64(ByHand(), make_batch(2, LENGTH), chunk_size=CHUNK)


class GradientInForward(torch.autograd.Function):
    """A loss whose forward saves the gradient of the logits."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad, None


class ByFormula(GradientInForward):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        chosen = F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
        ctx.save_for_backward((torch.softmax(logits, -1) - chosen) / labels.numel())
        return F.cross_entropy(logits, labels)


class ByFunctionalGradients(GradientInForward):
    """Chunked by hand, the gradient of each chunk by ``torch.func``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        def total(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits, labels, reduction="sum")

        parts = zip(logits.split(5), labels.split(5), strict=True)
        found = [torch.func.grad_and_value(total)(*part) for part in parts]
        ctx.save_for_backward(torch.cat([slope for slope, _ in found]) / labels.numel())
        return torch.stack([value for _, value in found]).sum() / labels.numel()


@pytest.mark.parametrize(
    ("loss", "on_barrier"), [(ByFormula, "warn"), (ByFunctionalGradients, "ignore")]
)
def test_loss_that_computes_its_gradient_in_forward_breaks_compilation(
    loss: type[GradientInForward], on_barrier: str
) -> None:
    class WithLoss(LogitsOnly):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            logits = super().forward(input_ids)
            return loss.apply(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    batch = make_batch(2, LENGTH, ignored=0.0)
    assert_exact_fp64(WithLoss(), batch, chunk_size=CHUNK, on_barrier=on_barrier)


def _logits(function: Callable[..., Any], batch: Batch) -> Tensor:
    with torch.no_grad():
        return function(**batch).logits + 0


@pytest.mark.parametrize(
    "positions",
    slow_but(
        [[*range(9), *range(12)], [0, 1, 0, 0, 1]],
        [[*range(9), *range(12)], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [*range(20), 0]],
    ),
    ids=["two documents", "a document of one token", "all of one token", "last token alone"],
)
def test_later_document_attends_to_an_earlier_one(positions: list[int]) -> None:
    model = make_dtype_preserving(build("llama"))
    batch = make_batch(1, len(positions), ignored=0.0)
    batch |= {"position_ids": torch.tensor([positions]), "use_cache": False}
    function = streamed(model, chunk_size=2 if len(positions) < 8 else CHUNK)
    assert_same_step(run(model, batch, function), run(model, batch))
    before = _logits(function, batch)
    second = positions.index(0, 1)
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][:, :second] = (batch["input_ids"][:, :second] + 17) % VOCAB
    after = _logits(function, batch)
    torch.testing.assert_close(after[:, second:], before[:, second:], rtol=1e-12, atol=1e-14)
    assert (after - before)[:, :second].abs().max() > 0.1


@pytest.mark.parametrize("padding", slow_but([5], [5, 8, 13]))
def test_left_padded_row_differs_from_the_row_alone(padding: int) -> None:
    model = make_dtype_preserving(build("llama"))
    alone = make_batch(1, LENGTH)
    padded = {
        "input_ids": F.pad(alone["input_ids"], (padding, 0), value=0),
        "labels": F.pad(alone["labels"], (padding, 0), value=-100),
        "attention_mask": F.pad(torch.ones_like(alone["input_ids"]), (padding, 0)),
        "position_ids": F.pad(torch.arange(LENGTH)[None], (padding, 0)),
    }
    # The first real token is no target in the row alone: nothing comes before it.
    padded["labels"][:, padding] = -100
    want = run(model, alone)
    assert_same_step(run(model, padded, streamed(model, chunk_size=CHUNK)), want)


def test_nothing_is_chunked_with_a_dynamic_length() -> None:
    model, batch = build("nanogpt").double(), make_batch(2, LENGTH)
    function = streamed(model, dynamic=True, chunk_size=CHUNK)
    assert_same_step(run(model, batch, function), run(model, batch))
    assert_streamed_whole()

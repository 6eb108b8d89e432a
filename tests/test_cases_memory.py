"""Reported faults of memory: what must not be allocated, and what must not be redone per chunk.

Sizes are such that each test's forbidden tensor is larger than every rightful one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from streambp_fx.measure import memory_use
from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.marks import slow_but
from tests.models import Batch, build, loss_of, make_batch
from tests.oracle import assert_exact_fp64
from tests.own_models import NanoGPT, add_low_rank
from tests.watch import allocations, assert_no_allocation_of

FLOAT = 4  # bytes


def _step(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """A training step of the compiled ``model`` that has run once already."""
    function = streamed(model, **options)

    def step() -> None:
        loss_of(function(**batch)).backward()

    step()
    return step


def _large_head(vocab: int = 2048, hidden: int = 64) -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT(layers=1, vocab=vocab, hidden=hidden, tied=False)


@needs_report
def test_frozen_head_allocates_its_gradient() -> None:
    model = _large_head()
    model.head.requires_grad_(False)
    model.token.requires_grad_(False)
    step = _step(model, make_batch(1, 64), chunk_size=16)
    assert_no_allocation_of(step, 2048 * 64 * FLOAT)


@needs_report
def test_smaller_chunk_raises_the_peak() -> None:
    model, batch = _large_head(), make_batch(1, 128)
    peaks = []
    for size in (128, 64, 40, 32, 16, 8):
        peaks.append(memory_use(_step(model, batch, chunk_size=size), "cpu").peak)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1] + 100 * 2048 * FLOAT


@needs_report
def test_low_rank_head_allocates_the_full_gradient() -> None:
    model = add_low_rank(_large_head(), "head")
    step = _step(model, make_batch(1, 64), chunk_size=16)
    assert_no_allocation_of(step, 2048 * 64 * FLOAT)


@needs_report
@pytest.mark.parametrize("compile_bodies", [False, True])
def test_each_chunk_builds_a_weight_gradient_of_its_own(compile_bodies: bool) -> None:
    """Allocations as large as the head do not grow in number with the chunks."""
    batch = make_batch(1, 64)

    def large(chunk: int) -> int:
        model = _large_head()
        model.token.requires_grad_(False)
        step = _step(model, batch, chunk_size=chunk, compile_bodies=compile_bodies)
        return sum(size >= 2048 * 64 * FLOAT for size in allocations(step))

    assert 1 <= large(4) <= large(16) <= 2


@needs_report
@pytest.mark.parametrize("compile_bodies", [False, True])
def test_each_chunk_builds_an_embedding_gradient_of_its_own(compile_bodies: bool) -> None:
    batch = make_batch(1, 64)

    def large(chunk: int) -> int:
        model = _large_head()
        model.head.requires_grad_(False)
        step = _step(model, batch, chunk_size=chunk, compile_bodies=compile_bodies)
        return sum(size >= 2048 * 64 * FLOAT for size in allocations(step))

    assert 1 <= large(4) <= large(16) <= 2


@needs_report
@pytest.mark.parametrize("kind", ["left_padded", "right_padded", "packed"])
@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gpt2"]))
def test_masked_row_builds_a_mask_of_all_pairs(name: str, kind: str) -> None:
    model = build(name)
    step = _step(model, make_batch(1, 512, kind=kind), chunk_size=16)
    assert_streamed_whole()
    assert_no_allocation_of(step, 512 * 512)


@needs_report
def test_checkpointed_model_saves_nothing() -> None:
    model = build("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step = _step(model, {**make_batch(1, 512), "use_cache": False}, chunk_size=16)
    assert_streamed_whole()
    assert_no_allocation_of(step, 512 * 512)


class TwiceThrough(NanoGPT):
    """The same blocks, twice: each weight gathers gradient from two places."""

    def features(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.norm(x)


def test_blocks_used_twice_are_right() -> None:
    torch.manual_seed(0)
    assert_exact_fp64(TwiceThrough(), make_batch(2, 21), chunk_size=8)


@needs_report
def test_blocks_used_twice_keep_their_recomputation() -> None:
    torch.manual_seed(0)
    step = _step(TwiceThrough(layers=4, vocab=512), make_batch(1, 512), chunk_size=16)
    assert_streamed_whole()
    assert_no_allocation_of(step, 512 * 512)


_gathers = 0


@torch.library.custom_op("streambp_tests::gather_weight", mutates_args=())
def _gather_weight(weight: Tensor) -> Tensor:
    global _gathers
    _gathers += 1
    return weight.clone()


@_gather_weight.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


_gather_weight.register_autograd(lambda ctx, grad: grad)


class _Gathered(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.ops.streambp_tests.gather_weight(weight)


def test_sharded_head_is_gathered_for_each_chunk() -> None:
    """A weight that is made by an op (as sharded ones are, by a gather) is made outside loops."""
    model = build("nanogpt", tied=False)
    parametrize.register_parametrization(model.head, "weight", _Gathered())
    step = _step(model, make_batch(1, 64), chunk_size=4)
    before = _gathers
    step()
    made = _gathers - before
    assert 1 <= made <= 2, f"{made} gathers; once in forward, at most once more in backward"
    assert_streamed_whole()

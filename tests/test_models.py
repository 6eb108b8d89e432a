"""Every model of the zoo: gradients equal eager's in float64 for every chunking, batch and mask."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.marks import SLOW, slow_but
from tests.models import NAMES, OWN, build, loss_of, make_batch
from tests.oracle import assert_exact_fp64
from tests.own_models import LogitsOnly, loss_fn
from tests.watch import assert_no_allocation_of

LENGTH = 21
# Chunk sizes that make one chunk, two, three, seven, a ragged last one, and one longer than all.
CHUNKS = {"1": 21, "2": 11, "3": 7, "7": 3, "ragged": 8, "longer": 64}
# What the default run covers: each model once; more of those that stand for the others.
ONCE = ("ragged", 3)
MORE = {
    "nanogpt": [(count, batch) for count in CHUNKS for batch in (1, 3)],
    "llama": [("ragged", 1), ("longer", 3)],
}
THROUGH_INDUCTOR = ("nanogpt", "llama")
WATCHED = ("nanogpt", "trilgpt", "llama", "gpt2")
MASKED = tuple(name for name in NAMES if name not in OWN)


def _chunkings() -> list[object]:
    """Each model, chunking and batch size; most are slow."""
    return [
        pytest.param(
            *(name, chunk, batch),
            id=f"{name}-{count}-B{batch}",
            marks=[] if (count, batch) in [ONCE, *MORE.get(name, [])] else [SLOW],
        )
        for name in NAMES
        for count, chunk in CHUNKS.items()
        for batch in (1, 3)
    ]


@pytest.mark.parametrize(("name", "chunk", "batch"), _chunkings())
def test_gradients_equal_eager(name: str, chunk: int, batch: int) -> None:
    assert_exact_fp64(build(name), make_batch(batch, LENGTH), chunk_size=chunk)


@pytest.mark.parametrize("name", slow_but(THROUGH_INDUCTOR, NAMES))
def test_gradients_equal_eager_through_inductor(name: str) -> None:
    assert_exact_fp64(build(name), make_batch(2, LENGTH), chunk_size=8, compile_bodies=True)


@pytest.mark.parametrize("kind", ["left_padded", "right_padded", "packed", "mask_4d"])
@pytest.mark.parametrize("name", slow_but(["llama"], MASKED))
def test_masked_batch_equals_eager(name: str, kind: str) -> None:
    if name == "opt" and kind == "mask_4d":
        pytest.skip("OPT counts its positions from a 2-D mask")
    assert_exact_fp64(build(name), make_batch(3, LENGTH, kind=kind), chunk_size=8)


@pytest.mark.parametrize("head_chunk", [1, 5, 64])
def test_head_has_a_chunk_size_of_its_own(head_chunk: int) -> None:
    batch = make_batch(2, LENGTH)
    assert_exact_fp64(build("llama"), batch, chunk_size=8, head_chunk_size=head_chunk)


def test_graph_break_between_head_and_loss() -> None:
    """Transformers warns, and Dynamo breaks there, where a model's loss has no name."""
    model = build("gpt2")
    model.loss_type = None
    assert_exact_fp64(model, make_batch(2, LENGTH), chunk_size=8)


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_written_outside_of_the_model(tied: bool, chunk: int) -> None:
    torch.manual_seed(0)
    model = LogitsOnly(tied=tied).double()
    ids = make_batch(2, LENGTH)["input_ids"]
    want = loss_fn(model, ids)
    right = torch.autograd.grad(want, list(model.parameters()))
    got = streamed(partial(loss_fn, model), chunk_size=chunk)(ids)
    left = torch.autograd.grad(got, list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", slow_but(WATCHED, NAMES))
@needs_report
def test_everything_is_streamed(name: str) -> None:
    """No barrier, and no allocation as large as ``T x T`` or ``T x V`` bytes.

    A byte for each pair of positions: so that a boolean mask of them all is found too.
    """
    length = vocab = 512
    changes = {} if name in OWN else {"vocab_size": vocab}
    model = build(name, **changes)
    batch = make_batch(1, length)
    function = streamed(model, chunk_size=16)

    def step() -> None:
        loss_of(function(**batch)).backward()

    step()
    assert_streamed_whole()
    assert_no_allocation_of(step, length * vocab)


def test_allocation_watcher_sees_what_eager_allocates() -> None:
    model = build("llama", vocab_size=512)
    batch = make_batch(1, 512)
    with pytest.raises(AssertionError, match="allocations of >="):
        assert_no_allocation_of(lambda: model(**batch).loss.backward(), 512 * 512)

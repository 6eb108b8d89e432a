"""A new length compiles nothing new once the length is dynamic, and is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.marks import SLOW, slow_but
from tests.models import build, make_batch, make_dtype_preserving
from tests.oracle import assert_same_step, run
from tests.own_models import LogitsOnly
from tests.watch import count_compiles

CHUNK = 16
# Below one chunk, exactly one, ragged, whole, and long beyond the first; none is repeated.
LENGTHS = [5, 11, 16, 17, 23, 31, 32, 47, 64, 129]


def _check_lengths(
    name: str,
    first: list[int],
    *,
    dynamic: bool | None,
    compile_bodies: bool,
    mark: Callable[[dict[str, Any]], None] = lambda batch: None,
) -> None:
    """Compile with the lengths ``first``; then each of `LENGTHS` is exact and compiles nothing."""
    model = make_dtype_preserving(build(name))
    function = streamed(model, dynamic=dynamic, chunk_size=CHUNK, compile_bodies=compile_bodies)
    for length in first:
        batch = make_batch(2, length)
        mark(batch)
        run(model, batch, function)
    for length in LENGTHS:
        batch = make_batch(2, length)
        with count_compiles() as compiles:
            got = run(model, batch, function)
        assert_same_step(got, run(model, batch))
        assert (compiles.frames, compiles.bodies) == (0, 0), f"length {length} compiled anew"


@pytest.mark.parametrize("compile_bodies", slow_but([False], [False, True]))
@pytest.mark.parametrize("name", slow_but(["nanogpt"], ["nanogpt", "llama", "gpt2"]))
def test_dynamic_length_compiles_once(name: str, compile_bodies: bool) -> None:
    # The first length has whole chunks and a ragged one: with bodies compiled, both variants.
    _check_lengths(name, [41], dynamic=True, compile_bodies=compile_bodies)


@pytest.mark.parametrize("name", slow_but(["nanogpt"], ["nanogpt", "llama"]))
def test_automatic_dynamic_length_compiles_twice(name: str) -> None:
    _check_lengths(name, [41, 57], dynamic=None, compile_bodies=False)


@SLOW
def test_length_marked_dynamic_compiles_once() -> None:
    def mark(batch: dict[str, Any]) -> None:
        for value in batch.values():
            torch._dynamo.mark_dynamic(value, 1)

    _check_lengths("nanogpt", [41], dynamic=None, compile_bodies=False, mark=mark)


def test_twenty_lengths_compile_a_bounded_number_of_times() -> None:
    model = make_dtype_preserving(build("nanogpt"))
    function = streamed(model, chunk_size=CHUNK)
    with count_compiles() as compiles:
        for length in range(100, 140, 2):
            run(model, make_batch(1, length), function)
    assert 0 < compiles.frames <= 4, "at most one static and one dynamic frame and graph"


@pytest.mark.parametrize("length", slow_but([65], [63, 64, 65, 66]))
def test_dynamic_length_near_a_chunk_multiple(length: int) -> None:
    model = make_dtype_preserving(build("nanogpt"))
    batch = make_batch(1, length)
    got = run(model, batch, streamed(model, dynamic=True, chunk_size=CHUNK))
    assert_same_step(got, run(model, batch))


@pytest.mark.parametrize("dynamic", [None, True])
def test_length_two_and_one_token_of_loss(dynamic: bool | None) -> None:
    model = make_dtype_preserving(build("nanogpt"))
    batch = make_batch(2, 2, ignored=0.0)
    got = run(model, batch, streamed(model, dynamic=dynamic, chunk_size=CHUNK))
    assert_same_step(got, run(model, batch))


@needs_report
def test_batch_and_length_that_become_dynamic_one_after_the_other() -> None:
    """Ids and labels get symbols of their own then, and are still known to have one shape."""
    model = make_dtype_preserving(build("nanogpt"))
    function = streamed(model, chunk_size=CHUNK)
    for rows, length in [(2, 36), (2, 41), (6, 57)]:
        run(model, make_batch(rows, length), function)
        assert_streamed_whole()
    for rows, length in [(3, 23), (5, 70), (2, 36)]:
        batch = make_batch(rows, length)
        with count_compiles() as compiles:
            got = run(model, batch, function)
        assert_same_step(got, run(model, batch))
        assert compiles.frames == 0


@needs_report
def test_labels_of_another_shape_compile_anew_and_are_right() -> None:
    def loss_fn(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(ids)[:, -labels.shape[1] :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model = LogitsOnly().double()
    function = streamed(loss_fn, dynamic=True, chunk_size=CHUNK)
    for tokens, answer in [(36, 36), (36, 20), (41, 41)]:
        ids = make_batch(2, tokens)["input_ids"]
        labels = ids[:, -answer:].clone()
        torch.testing.assert_close(function(ids, labels), loss_fn(ids, labels))

"""Memory is exact, pairs are pairs, and a wrong gradient can not look right."""

from __future__ import annotations

import pytest
import torch

from streambp_fx import _torch
from streambp_fx.measure import (
    MemoryUse,
    Quartiles,
    gradient_error,
    memory_use,
    paired_ratio,
    paired_times,
    peak_memory,
)

FLOAT = 4


def test_peak_counts_what_lives_at_once() -> None:
    def step() -> None:
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
        del second, third

    assert peak_memory(step) == 3000 * FLOAT


def test_peak_is_above_the_start() -> None:
    alive_before = [torch.empty(10_000)]
    assert memory_use(lambda: torch.empty(4000).fill_(1).sum()) == MemoryUse(4001 * FLOAT, 0)
    assert alive_before[0].numel() == 10_000


def test_left_counts_what_a_step_keeps() -> None:
    kept = []

    def step() -> None:
        torch.empty(300)
        kept.append(torch.empty(100))

    assert memory_use(step) == MemoryUse(peak=400 * FLOAT - 100 * FLOAT, left=100 * FLOAT)


def test_peak_sees_the_backward() -> None:
    weight = torch.ones(1000, requires_grad=True)
    weight.grad = torch.zeros(1000)

    def step() -> None:
        (weight * 2).sum().backward()

    # The product, then in backward the expanded sum's product with 2 (the sum is a 0-d tensor).
    assert 1000 * FLOAT <= peak_memory(step) <= 2000 * FLOAT + 64


def test_peak_is_the_same_every_time() -> None:
    layer = torch.nn.Linear(64, 64)
    data = torch.randn(32, 64)
    layer(data).sum().backward()
    peaks = {peak_memory(lambda: layer(data).square().sum().backward()) for _ in range(3)}
    assert len(peaks) == 1 and peaks.pop() > 0


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="not on meta"):
        peak_memory(lambda: None, "meta")


def test_a_profile_without_events_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has ended"):
        list(_torch.allocations(torch.profiler.profile()))


def test_a_round_runs_every_step_once_and_then_in_reverse() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = paired_times(steps, rounds=3, on_round=lambda: calls.append("|"))
    assert "".join(calls) == "abc|cba|abc|"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_paired_ratio_is_taken_within_pairs() -> None:
    # The machine slows tenfold half way; the ratio within pairs stays 2.
    assert paired_ratio([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0]) == Quartiles(2, 2, 2)
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_quartiles() -> None:
    assert Quartiles.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Quartiles(2.0, 3.0, 4.0)
    assert Quartiles.of([7.0]) == Quartiles(7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="empty"):
        Quartiles.of([])


def test_gradient_error_is_the_worst_parameters() -> None:
    right = {"large": torch.full((100,), 10.0), "small": torch.tensor([1.0, 0.0])}
    assert gradient_error(right, right) == 0.0
    wrong = dict(right, small=torch.tensor([1.0, 0.5]))
    assert gradient_error(wrong, right) == pytest.approx(0.5)


def test_gradient_error_of_a_vanishing_gradient_is_held_against_the_floor() -> None:
    right = {"w": torch.tensor([1.0]), "zero": torch.tensor([0.0])}
    assert gradient_error(dict(right, zero=torch.tensor([1e-9])), right) == pytest.approx(1e-3)
    assert gradient_error(dict(right, zero=torch.tensor([1.0])), right) == pytest.approx(1e6)
    zeros = {"zero": torch.tensor([0.0])}
    assert gradient_error({"zero": torch.tensor([1.0])}, zeros) == float("inf")


def test_missing_and_nan_gradients_are_infinitely_wrong() -> None:
    right = {"w": torch.tensor([1.0]), "frozen": None}
    assert gradient_error(right, right) == 0.0
    assert gradient_error(dict(right, w=None), right) == float("inf")
    assert gradient_error(dict(right, frozen=torch.tensor([1.0])), right) == float("inf")
    assert gradient_error(dict(right, w=torch.tensor([float("nan")])), right) == float("inf")
    with pytest.raises(ValueError, match="frozen"):
        gradient_error({"w": torch.tensor([1.0])}, right)

"""Exact memory, paired time and gradient error of a training step, on CPU or CUDA.

Glossary
--------
step
    A callable that runs one forward and backward and leaves no tensor of its own alive.
peak
    The most bytes that are allocated at once during a step, above what was allocated at its start.
    Counted from the allocator's own events, so that it is exact and the same on every run: the
    resident size of a process says how much memory was never given back, not how much was needed.
paired
    Two steps are timed in turn, and the ratio is taken within each pair, so that what slows a
    machine for a while slows both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from ._torch import allocations

Step = Callable[[], object]

NORM_FLOOR = 1e-6
"""Share of the whole gradient's norm below which a parameter's own gradient counts as zero."""


@dataclass(frozen=True)
class MemoryUse:
    """What a step does to memory, in bytes: its peak, and what it leaves allocated at its end."""

    peak: int
    left: int


@dataclass(frozen=True)
class Quartiles:
    """The median of a sample and the quartiles around it."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """The quartiles of ``values``.

        Raises:
            ValueError: there are no values.
        """
        if not values:
            raise ValueError("quartiles of an empty sample")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(lower, median, upper)


def memory_use(step: Step, device: torch.device | str = "cpu") -> MemoryUse:
    """Run ``step`` once and count its bytes on ``device``.

    On the CPU the profiler's allocation events are summed in time order. The profiler knows no
    block that is older than itself, so that a step which frees such blocks (an optimizer's, a
    cache's) is charged more than it takes. On CUDA the caching allocator's statistics are read,
    whose peak is reset.

    Raises:
        ValueError: ``device`` is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - start
        return MemoryUse(peak, torch.cuda.memory_allocated(device) - start)
    if device.type != "cpu":
        raise ValueError(f"memory is counted on cpu and cuda, not on {device.type}")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return _add_up(allocations(profiled))


def peak_memory(step: Step, device: torch.device | str = "cpu") -> int:
    """The most bytes alive at once during one run of ``step``, above those alive at its start.

    Raises:
        ValueError: ``device`` is neither a CPU nor a CUDA device.
    """
    return memory_use(step, device).peak


def _add_up(sizes: Iterable[int]) -> MemoryUse:
    """Peak and end of the running sum of allocations (positive) and frees (negative)."""
    alive = peak = 0
    for size in sizes:
        alive += size
        peak = max(peak, alive)
    return MemoryUse(peak, alive)


def step_time(step: Step, device: torch.device | str = "cpu") -> float:
    """Seconds that one run of ``step`` takes, its work on ``device`` included."""
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if on_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def paired_times(
    steps: Mapping[str, Step],
    rounds: int,
    device: torch.device | str = "cpu",
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each of ``steps`` in each of ``rounds`` rounds; a round runs all of them once.

    Every other round goes through the steps in reverse, so that none profits from its place.
    Compiling is not kept out: run each step once before. ``on_round`` is called after each round.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds):
        names = list(steps)
        for name in reversed(names) if round_number % 2 else names:
            times[name].append(step_time(steps[name], device))
        on_round()
    return times


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Quartiles:
    """The quartiles of ``times[i] / baseline[i]``.

    Raises:
        ValueError: the two are not of one length, or are empty.
    """
    ratios = [own / base for own, base in zip(times, baseline, strict=True)]
    return Quartiles.of(ratios)


def gradient_error(
    gradients: Mapping[str, torch.Tensor | None], reference: Mapping[str, torch.Tensor | None]
) -> float:
    """The worst parameter's error, as `gradient_errors` has it.

    Raises:
        ValueError: the two name different parameters.
    """
    return max(gradient_errors(gradients, reference).values(), default=0.0)


def gradient_errors(
    gradients: Mapping[str, torch.Tensor | None], reference: Mapping[str, torch.Tensor | None]
) -> dict[str, float]:
    """Each parameter's ``|g - r| / |r|``, in Euclidean norm and fp64.

    A parameter whose reference gradient is next to nothing (under `NORM_FLOOR` of the whole
    gradient's norm) is held against that floor instead: rounding alone is then all it has. One
    that has a gradient on one side and ``None`` on the other, or a NaN, counts as infinitely wrong.

    Raises:
        ValueError: the two name different parameters.
    """
    if gradients.keys() != reference.keys():
        differing = sorted(gradients.keys() ^ reference.keys())
        raise ValueError(f"gradients are of different parameters: {', '.join(differing)}")
    wanted = {name: grad.double() for name, grad in reference.items() if grad is not None}
    norms = {name: float(grad.norm()) for name, grad in wanted.items()}
    floor = NORM_FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    errors: dict[str, float] = {}
    for name, grad in gradients.items():
        if grad is None or name not in wanted:
            error = 0.0 if grad is None and name not in wanted else float("inf")
        else:
            difference = float((grad.double() - wanted[name]).norm())
            scale = max(norms[name], floor)
            error = difference / scale if scale else (float("inf") if difference else 0.0)
        errors[name] = float("inf") if error != error else error
    return errors

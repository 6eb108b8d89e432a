"""Watching a step from outside: what it allocates, and what it compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile


def allocations(step: Callable[[], Any]) -> list[int]:
    """Bytes of every CPU allocation made while ``step`` runs, in order.

    The allocator reports them, so that buffers inside kernels and compiled bodies are seen, which
    no dispatch mode sees.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in events if event.nbytes() > 0]


def assert_no_allocation_of(step: Callable[[], Any], size: int) -> None:
    """Fail if ``step`` makes a single allocation of ``size`` bytes or more."""
    made = allocations(step)
    assert made, "the profiler saw no allocation at all"
    too_large = sorted((n for n in made if n >= size), reverse=True)
    assert not too_large, f"{len(too_large)} allocations of >= {size} bytes: {too_large[:10]}"


@dataclass
class Compiles:
    """Numbers of compilations. ``frames``: by Dynamo; ``bodies``: by Inductor."""

    frames: int = 0
    bodies: int = 0


@contextmanager
def count_compiles() -> Iterator[Compiles]:
    """Yields a `Compiles` that is filled in when the block ends."""
    frames, bodies = _frames(), _bodies()
    result = Compiles()
    yield result
    result.frames = _frames() - frames
    result.bodies = _bodies() - bodies


def _frames() -> int:
    return counters["frames"]["total"] + counters["stats"]["unique_graphs"]


def _bodies() -> int:
    # Each lookup in the code cache is one lowering, found there (hit) or not.
    return sum(n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache_"))

"""What the GPU script measures: parts, most important first, each with its share of the time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .gpu_steps import Case
from .shapes import Shape


@dataclass(frozen=True)
class Job:
    """Cases that one process measures in turn: they share a model and what it compiled.

    ``kind`` is one of `gpu_worker.measure_of`; ``seconds`` is the process's time limit.
    """

    kind: str
    cases: tuple[Case, ...]
    seconds: float
    shape: Shape = field(default_factory=Shape)
    dtype: str = "bf16"

    def message(self, cases: list[Case], device: str) -> dict[str, Any]:
        """What the process is told."""
        return {
            "kind": self.kind,
            "cases": cases,
            "device": device,
            "shape": asdict(self.shape),
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class Part:
    """One results file. What it leaves of its ``seconds`` goes to the parts after it.

    ``at_once``: how many of its processes may run side by side, where nothing is timed.
    """

    name: str
    seconds: float
    jobs: tuple[Job, ...]
    at_once: int = 1


@dataclass(frozen=True)
class Size:
    """How large everything is. ``deep`` is the whole model, ``short`` one of fewer layers."""

    deep: Shape
    short: Shape
    exact: Shape
    attention: dict[str, int]
    exact_tokens: int
    exact_chunk: int
    lengths: tuple[int, ...]
    rounds: int
    peers: tuple[str, ...]
    search: dict[str, float]
    objective_tokens: int
    sweep_tokens: int
    sweep: tuple[int, ...]
    bodies: str
    """An option for every streamed way: whether bodies are compiled."""


FULL = Size(
    deep=Shape(),
    short=Shape(layers=8),
    exact=Shape(layers=2, vocabulary=32768),
    attention={"tokens": 2900, "chunk": 1024, "heads": 8, "key_heads": 2, "head_size": 128},
    exact_tokens=1900,
    exact_chunk=512,
    lengths=(8192, 16384, 32768),
    rounds=3,
    peers=("gc", "compile"),
    search={"limit_gib": 24, "start": 4096, "most": 131072, "bisections": 3},
    objective_tokens=4096,
    sweep_tokens=16384,
    sweep=(512, 1024, 2048, 4096),
    bodies="compile_bodies=True",
)

_SMALL = Shape(
    layers=2, width=32, intermediate=48, heads=4, key_heads=2, head_size=8, vocabulary=64
)

TINY = Size(
    deep=_SMALL,
    short=_SMALL,
    exact=_SMALL,
    attention={"tokens": 37, "chunk": 16, "heads": 4, "key_heads": 2, "head_size": 8},
    exact_tokens=37,
    exact_chunk=16,
    lengths=(24, 40),
    rounds=2,
    peers=("gc",),
    search={"limit_gib": 1 / 4096, "start": 16, "most": 256, "bisections": 2},
    objective_tokens=24,
    sweep_tokens=40,
    sweep=(16, 24),
    bodies="compile_bodies=False",
)

SIZES = {"full": FULL, "tiny": TINY}


def parts(size: Size) -> tuple[Part, ...]:
    """All parts, most important first. Their seconds add up to under ten minutes."""
    return (
        _exactness(size),
        _peak_and_time(size),
        _longest(size),
        _objectives(size),
        _chunks(size),
        _kernels(size),
    )


def _streamed(size: Size, **options: int) -> str:
    chosen = [f"{name}={value}" for name, value in options.items()]
    return "streambp:" + ",".join([*chosen, size.bodies])


def _exactness(size: Size) -> Part:
    """The kernels alone, then a model whose bodies run op by op, then one that is compiled.

    So that what is wrong in one of them is told from what is wrong in the others.
    """
    attention = tuple(
        {"dtype": dtype, "padded": padded, **size.attention}
        for dtype, padded in (("bf16", False), ("fp32", False), ("bf16", True), ("fp32", True))
    )
    bodies = dict.fromkeys(("compile_bodies=False", size.bodies))
    gradients: tuple[Case, ...] = tuple(
        {
            "way": f"streambp:chunk_size={size.exact_chunk},{body}",
            "dtype": dtype,
            "rows": 2,
            "tokens": size.exact_tokens,
            "shape": asdict(size.exact),
        }
        for body in bodies
        for dtype in ("bf16", "fp32")
    )
    jobs = (
        Job("attention", attention, 60),
        *(Job("gradients", (case,), 100, size.exact, case["dtype"]) for case in gradients),
    )
    return Part("exactness", 105, jobs, at_once=5)


def _peak_and_time(size: Size) -> Part:
    ways = (_streamed(size), *size.peers)
    limits = {"gc": 60.0, "compile": 150.0}
    jobs = tuple(
        Job(
            "steps",
            tuple({"way": way, "tokens": n, "rounds": size.rounds} for n in size.lengths),
            limits.get(way, 120.0),
            size.deep,
        )
        for way in ways
    )
    return Part("peak_and_time", 215, jobs)


def _longest(size: Size) -> Part:
    ways = (_streamed(size), *size.peers)
    jobs = tuple(Job("longest", ({"way": way, **size.search},), 80, size.deep) for way in ways)
    return Part("longest", 110, jobs)


def _objectives(size: Size) -> Part:
    ways = (_streamed(size), "gc")
    jobs = tuple(
        Job(
            "steps",
            ({"objective": objective, "way": way, **_pair(size)},),
            60,
            size.short,
        )
        for objective in ("dpo", "grpo")
        for way in ways
    )
    return Part("objectives", 60, jobs)


def _pair(size: Size) -> Case:
    return {"rows": 2, "tokens": size.objective_tokens, "rounds": size.rounds}


def _chunks(size: Size) -> Part:
    ways = [
        *(_streamed(size, chunk_size=chunk) for chunk in size.sweep),
        *(_streamed(size, head_chunk_size=chunk) for chunk in size.sweep),
    ]
    cases = tuple({"way": way, "tokens": size.sweep_tokens, "rounds": size.rounds} for way in ways)
    return Part("chunk_sizes", 50, (Job("steps", cases, 80, size.short),))


def _kernels(size: Size) -> Part:
    cases = tuple({"way": way, "tokens": size.sweep_tokens} for way in (_streamed(size), "gc"))
    return Part("kernels", 30, (Job("kernels", cases, 60, size.short),))

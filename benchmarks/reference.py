"""The reference benchmark: memory, time and compile time of one step, against what users have.

    python -m benchmarks.reference                       all parts, all modes
    python -m benchmarks.reference --part memory --tokens 4096
    python -m benchmarks.reference --mode gc --mode streambp --long

The model is a Qwen3 of 4 layers, width 512, 8 query heads (4 key heads) of 64, MLP 1536, vocabulary
32000 and an untied head, in fp32, batch 1. Each measurement runs in a process of its own (see
`benchmarks.worker`), so that nothing of one is in another. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .machine import commit, describe
from .processes import ROOT, run_module
from .tables import print_tables
from .worker import Job

RESULTS = Path(__file__).parent / "results"

Part = StrEnum("Part", ["memory", "resident", "time", "phases", "compile", "optimizer"])
Mode = StrEnum("Mode", ["eager", "gc", "compile", "streambp"])

COMPILED_MODES = ("compile", "streambp")
COMPILE_LAYERS = (24, 48)
COMPILE_TOKENS = 1024
LONG_LAYERS = 12
LONG_TOKENS = 16384

SECONDS = 3600.0
"""No measurement takes longer."""


@dataclass(frozen=True)
class Measurement:
    """A job and what came of it: ``result``, or ``failure``, why there is none."""

    job: Job
    result: dict[str, Any] | None = None
    failure: str | None = None


def jobs(
    parts: list[Part], modes: list[Mode], tokens: list[int], rounds: int, device: str, long: bool
) -> Iterator[Job]:
    """Every measurement that the flags ask for, in the order in which they run."""
    for part in parts:
        for mode in modes:
            if part is Part.compile:
                if mode in COMPILED_MODES:
                    for layers in COMPILE_LAYERS:
                        yield Job(part, mode, COMPILE_TOKENS, layers, rounds=1, device=device)
                continue
            for length in tokens:
                yield Job(part, mode, length, rounds=rounds, device=device)
    if long:
        for mode in modes:
            yield Job(Part.memory, mode, LONG_TOKENS, layers=LONG_LAYERS, device=device)


def measure(job: Job, seconds: float = SECONDS, path: str | None = None) -> Measurement:
    """Run ``job`` in a fresh process.

    One that measures compiling starts with empty caches, and a second process with those that it
    left; what that one took is under ``second``.

    Args:
        job: what to measure.
        seconds: its time limit.
        path: a folder of packages that the process finds before those installed.
    """
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as empty:
        environment = {}
        if job.part == Part.compile:
            environment["TORCHINDUCTOR_CACHE_DIR"] = empty
        if path is not None:
            environment["PYTHONPATH"] = os.pathsep.join([path, str(ROOT)])
        for _ in range(2 if job.part == Part.compile else 1):
            ended = run_module(
                "benchmarks.worker", asdict(job), seconds, lines.append, environment=environment
            )
            if ended.failure or not lines:
                return Measurement(job, failure=ended.failure or "ended without a result")
    first, *second = lines
    return Measurement(job, result={**first, "second": second[0]} if second else first)


def growth(measurements: list[Measurement]) -> list[dict[str, Any]]:
    """Bytes of peak that each further token costs, between the lengths that were measured."""
    peaks: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for measurement in measurements:
        job = measurement.job
        if job.part == Part.memory and measurement.result is not None:
            point = (job.tokens, measurement.result["peak"])
            peaks.setdefault((job.mode, job.layers), []).append(point)
    return [
        {
            "mode": mode,
            "layers": layers,
            "from": shorter,
            "to": longer,
            "bytes_per_token": (more - less) / (longer - shorter),
        }
        for (mode, layers), points in peaks.items()
        for (shorter, less), (longer, more) in pairwise(sorted(points))
    ]


def main(
    part: Annotated[list[Part] | None, typer.Option(help="Only this part; repeatable.")] = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="Only this mode; repeatable.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=2, help="Lengths; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of timed steps.")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    long: Annotated[
        bool, typer.Option("--long", help="Also the memory of 12 layers at 16384 tokens.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the results file.")] = "reference",
) -> None:
    """Measure the reference step. Exits with 1 if a measurement failed."""
    progress = Console(stderr=True)
    planned = list(
        jobs(part or list(Part), mode or list(Mode), tokens or [4096, 8192], rounds, device, long)
    )
    measurements: list[Measurement] = []
    for number, job in enumerate(planned, 1):
        told = f"{number} of {len(planned)}: {job.part}, {job.mode}, {job.tokens} tokens"
        with progress.status(told):
            measurements.append(measure(job))
        failure = measurements[-1].failure
        progress.print(f"{told}: {failure or 'done'}", markup=False, highlight=False)
    report = {
        "machine": describe(device),
        "commit": commit(),
        "measurements": [asdict(measurement) for measurement in measurements],
        "growth": growth(measurements),
    }
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{name}.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    console = Console()
    print_tables(report, console)
    failed = sum(measurement.failure is not None for measurement in measurements)
    where = target.relative_to(ROOT)
    console.print(f"{len(measurements) - failed} measured, {failed} failed; written to {where}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

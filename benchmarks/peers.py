"""The step against its peers: one run, one table, one plot.

    python -m benchmarks.peers                               hours on two cores
    python -m benchmarks.peers --sweep tokens --part memory
    python -m benchmarks.peers --peer gc --peer streambp

The model is that of `benchmarks.reference`. Sweeps go over the length, the chunk sizes, the layers
and the vocabulary; ``objectives`` compares DPO and GRPO. A measurement that the results file has
is not made again, so that a run can be stopped and goes on. Writes benchmarks/results/NAME.json
and NAME.png.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console

from .peer_environment import PeerError, folder_of_published
from .peer_plot import peaks_by_length, save_plot
from .peer_table import table
from .reference import Measurement, measure
from .saved import Saved, saved_results
from .worker import Job

Part = StrEnum("Part", ["memory", "exactness", "time"])
Sweep = StrEnum("Sweep", ["tokens", "chunks", "layers", "vocabulary", "objectives"])

PEERS: dict[str, tuple[str, str]] = {
    "eager": ("eager", ""),
    "gc": ("gc", ""),
    "compile": ("compile", ""),
    "compile+gc": ("compile+gc", ""),
    "budget 0.5": ("compile:activation_memory_budget=0.5", ""),
    "budget 0.1": ("compile:activation_memory_budget=0.1", ""),
    "auto_chunker": ("compile:auto_chunker.enable=True", ""),
    "gc, linear_cross_entropy": ("gc", "linear_cross_entropy"),
    "streambp==1.0": ("published", ""),
    "streambp": ("streambp", ""),
    "streambp 256": ("streambp:chunk_size=256,head_chunk_size=64", ""),
    "streambp 1024": ("streambp:chunk_size=1024,head_chunk_size=256", ""),
}
"""What a reader calls each peer; its way (see `benchmarks.ways`) and its objective."""

LENGTHS = (1024, 2048, 4096, 8192)
LAYERS = (2, 4, 8, 16)
VOCABULARIES = (8000, 32000, 128000)
CHUNKS = (128, 256, 512, 1024, 2048)
TOKENS = 4096
EXACTNESS_TOKENS = 1024
WIDTH = 120
"""Columns of the table where it goes into a file."""
SECONDS = 1800.0
"""A measurement that takes longer is recorded as failed."""


def jobs(
    sweeps: list[Sweep],
    parts: list[Part],
    peers: list[str],
    lengths: Sequence[int],
    rounds: int,
    device: str,
) -> Iterator[Job]:
    """Every measurement that the flags ask for, none twice, in the order in which they run."""
    seen = set()
    for sweep in sweeps:
        for part in parts:
            for job in _sweep(sweep, part, peers, lengths):
                job = replace(job, part=part, rounds=rounds, device=device)
                if job not in seen:
                    seen.add(job)
                    yield job


def _sweep(sweep: Sweep, part: Part, peers: list[str], lengths: Sequence[int]) -> Iterator[Job]:
    if sweep is Sweep.objectives:
        # An objective's gradients are checked by the tests, against formulas.
        if part is not Part.exactness:
            for objective in ("dpo", "grpo"):
                for way in ("gc", "streambp"):
                    yield Job(part, way, TOKENS // 2, rows=2, objective=objective)
        return
    if sweep is Sweep.chunks:
        if "streambp" in peers:
            for chunk in CHUNKS:
                yield Job(part, f"streambp:chunk_size={chunk}", TOKENS)
                yield Job(part, f"streambp:head_chunk_size={chunk}", TOKENS)
        return
    for peer in peers:
        way, objective = PEERS[peer]
        base = Job(part, way, TOKENS, objective=objective)
        if part is Part.exactness:
            if sweep is Sweep.tokens and not objective:
                yield replace(base, tokens=EXACTNESS_TOKENS)
        elif sweep is Sweep.tokens:
            yield from (replace(base, tokens=tokens) for tokens in lengths)
        elif sweep is Sweep.layers:
            yield from (replace(base, layers=layers) for layers in LAYERS)
        else:
            yield from (replace(base, vocabulary=size) for size in VOCABULARIES)


def peer_of(job: Job) -> str:
    """What a reader calls the peer that ``job`` measures."""
    names = {peer: name for name, peer in PEERS.items()}
    objective = "" if job.objective in ("dpo", "grpo") else job.objective
    return names.get((job.mode, objective), job.mode)


def run(planned: list[Job], saved: Saved, progress: Console) -> int:
    """Measure what ``saved`` does not have; returns how many of ``planned`` have no result."""
    for number, job in enumerate(planned, 1):
        if saved.has(asdict(job)):
            continue
        told = f"{number} of {len(planned)}: {job.part}, {peer_of(job)}, {job.tokens} tokens"
        with progress.status(told):
            measured = _measured(job)
        saved.add(asdict(job), measured.result, measured.failure)
        progress.print(f"{told}: {measured.failure or 'done'}", markup=False, highlight=False)
    return saved.failed([asdict(job) for job in planned])


def _measured(job: Job) -> Measurement:
    try:
        path = folder_of_published() if job.mode.startswith("published") else None
    except PeerError as error:
        return Measurement(job, failure=str(error))
    return measure(job, SECONDS, path)


def main(
    sweep: Annotated[list[Sweep] | None, typer.Option(help="Only this sweep; repeatable.")] = None,
    part: Annotated[list[Part] | None, typer.Option(help="Only this part; repeatable.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only this peer; repeatable.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=2, help="Only this length of its sweep; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of timed steps.")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    name: Annotated[str, typer.Option(help="Name of the results file.")] = "peers",
) -> None:
    """Measure all peers.

    Exits with 1 if a measurement failed; with 2 for an unknown peer, results of another machine, or
    without matplotlib.
    """
    # A file has no width, and rich takes 80 columns for it, in which names are cut.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    progress = Console(stderr=True)
    if find_spec("matplotlib") is None:
        progress.print("The plot needs: pip install matplotlib")
        raise typer.Exit(2)
    for chosen in peer or []:
        if chosen not in PEERS:
            raise typer.BadParameter(f"{chosen!r} is none of {', '.join(PEERS)}")
    saved = saved_results(name, device)
    sweeps, parts, peers = sweep or list(Sweep), part or list(Part), peer or list(PEERS)
    planned = list(jobs(sweeps, parts, peers, tokens or LENGTHS, rounds, device))
    failed = run(planned, saved, progress)
    rows = [{**entry, "peer": peer_of(Job(**entry["job"]))} for entry in saved.measurements]
    console.print(table(rows))
    if peaks_by_length(rows):
        save_plot(rows, saved.path.with_suffix(".png"))
    console.print(f"{len(planned) - failed} measured, {failed} failed; see {saved.path.name}")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

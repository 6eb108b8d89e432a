"""The head alone: peak, time and gradient error of a linear layer and cross entropy.

    python -m benchmarks.head
    python -m benchmarks.head --vocabulary 32000 --dtype fp32 --rounds 0     memory alone

8192 tokens of width 1024. Compared are `torch.compile`, the same with torch's auto_chunker,
`torch.nn.functional.linear_cross_entropy` with its ways to chunk, and this package at several
chunk sizes, each in a process of its own. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .head_worker import HeadJob
from .processes import run_module
from .saved import saved_results

WAYS = (
    "compile",
    "compile:auto_chunker.enable=True,auto_chunker.amplify_ratio_threshold=2",
    "linear_cross_entropy",
    "linear_cross_entropy:acc_policy=accurate",
    "linear_cross_entropy:acc_policy=compact,chunking_method=aspect_ratio",
    "streambp",
    "streambp:head_chunk_size=128",
    "streambp:head_chunk_size=512",
    "streambp:head_chunk_size=2048",
)
SECONDS = 3600.0
MIB = 2**20


def main(
    way: Annotated[list[str] | None, typer.Option(help="Only this way; repeatable.")] = None,
    vocabulary: Annotated[list[int] | None, typer.Option(min=2, help="Repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32 or bf16; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Rows of the head.")] = HeadJob.tokens,
    width: Annotated[int, typer.Option(min=1, help="Columns of the head.")] = HeadJob.width,
    rounds: Annotated[int, typer.Option(min=0, help="Pairs of timed steps; 0 for none.")] = 9,
    exactness: Annotated[bool, typer.Option(help="Compare gradients with fp64.")] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    name: Annotated[str, typer.Option(help="Name of the results file.")] = "head",
) -> None:
    """Measure what the results file does not have yet. Exits with 1 if a measurement failed."""
    saved = saved_results(name, device)
    jobs = [
        HeadJob(chosen, size, precision, tokens, width, rounds, exactness, device)
        for size in vocabulary or (32000, 128000)
        for precision in dtype or ("fp32", "bf16")
        for chosen in way or WAYS
    ]
    progress = Console(stderr=True)
    for number, job in enumerate(jobs, 1):
        told = f"{number} of {len(jobs)}: {job.way}, vocabulary {job.vocabulary}, {job.dtype}"
        if saved.has(asdict(job)):
            continue
        lines: list[dict[str, Any]] = []
        with progress.status(told):
            ended = run_module("benchmarks.head_worker", asdict(job), SECONDS, lines.append)
        failure = None if lines else ended.failure or "ended without a result"
        saved.add(asdict(job), lines[0] if lines else None, failure)
        progress.print(f"{told}: {failure or 'done'}", markup=False, highlight=False)
    failed = saved.failed([asdict(job) for job in jobs])
    Console().print(_table(saved.measurements))
    if failed:
        raise typer.Exit(1)


def _table(measurements: list[dict[str, Any]]) -> Table:
    table = Table(title="The head and its loss", title_justify="left")
    for heading in ("way", "vocabulary", "dtype", "peak MiB", "error", "ratio to compile"):
        table.add_column(heading)
    for measured in measurements:
        job, result = measured["job"], measured["result"]
        if result is None:
            cells = [measured["failure"], "", ""]
        else:
            ratio, error = result.get("ratio"), result.get("error")
            cells = [
                f"{result['peak'] / MIB:.1f}",
                "-" if error is None else f"{error:.1e}",
                "-" if ratio is None else f"{ratio['median']:.2f}",
            ]
        refused = result is not None and result.get("accepted") is False
        way = job["way"] + (" (refused)" if refused else "")
        table.add_row(way, str(job["vocabulary"]), job["dtype"], *cells)
    return table


if __name__ == "__main__":
    typer.run(main)

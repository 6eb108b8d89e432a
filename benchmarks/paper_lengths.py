"""The maximum lengths that the StreamBP paper reports, beside those that `plan` finds.

    python -m benchmarks.paper_lengths                  all lines: an hour or so on two cores
    python -m benchmarks.paper_lengths --line "SFT 4B LoRA"

Nothing is measured: plans need no GPU. A line that the results file already has is not planned
again, unless it is named. Writes benchmarks/results/paper_lengths.json.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from streambp_fx.explaining.peers import CHECKPOINTING, EAGER
from streambp_fx.planning import Setting, plan
from streambp_fx.planning.plan import STREAMED

from .machine import commit, describe

RESULTS = Path(__file__).parent / "results" / "paper_lengths.json"
RANK = 16
GROUP = 8
CHUNK_SIZE, HEAD_CHUNK_SIZE = 500, 100

PUBLISHED: dict[str, dict[str, tuple[float, float, float]]] = {
    "SFT": {
        "4B full": (7.0, 28.5, 200),
        "4B LoRA": (7.1, 36.5, 247),
        "8B full": (3.4, 15.7, 72),
        "8B LoRA": (5.1, 30.6, 142.4),
        "14B LoRA": (2.9, 23, 84.6),
        "32B LoRA": (0.4, 5.9, 16.3),
    },
    "GRPO": {
        "4B full": (0.9, 8.5, 18.2),
        "4B LoRA": (1.0, 12.1, 27.5),
        "8B LoRA": (0.7, 9.5, 16.5),
        "14B LoRA": (0.4, 6.9, 10.1),
    },
    "DPO": {
        "4B full": (3.1, 18.7, 57.2),
        "4B LoRA": (3.5, 32.2, 100.2),
        "8B LoRA": (2.5, 25.5, 60.9),
        "14B LoRA": (1.4, 18.5, 36.9),
        "32B LoRA": (0.2, 4.4, 7.8),
    },
}
"""Thousands of tokens, in eager, with gradient checkpointing and with StreamBP (arXiv 2506.03077);
one A800-80GB, batch 1, bf16 weights and gradients, Qwen3."""


@dataclass(frozen=True)
class Line:
    """One plan of the table: ``keeps_gradients`` as of `Setting`."""

    objective: str
    size: str
    keeps_gradients: bool

    def __str__(self) -> str:
        kept = ", gradients kept" if self.keeps_gradients else ""
        return f"{self.objective} {self.size}{kept}"

    def setting(self) -> Setting:
        """What the line is planned for."""
        return Setting(
            objective=self.objective.lower(),
            lora_rank=RANK if self.size.endswith("LoRA") else None,
            group=GROUP,
            keeps_gradients=self.keeps_gradients,
        )


def lines() -> list[Line]:
    """Every line; full training without and with gradients of an earlier micro-batch."""
    return [
        Line(objective, size, keeps)
        for objective, sizes in PUBLISHED.items()
        for size in sizes
        for keeps in ((False, True) if size.endswith("full") else (False,))
    ]


def planned(line: Line, console: Console) -> dict[str, Any]:
    """The plan of one line, as it goes into the results: lines may be of different versions."""
    made_with = {"machine": describe("cpu"), "commit": commit()}
    with console.status(str(line)) as status:
        found = plan(
            f"Qwen3-{line.size.split()[0]}",
            line.setting(),
            chunk_size=max(16, CHUNK_SIZE // line.setting().rows),
            head_chunk_size=max(16, HEAD_CHUNK_SIZE // line.setting().rows),
            on_progress=lambda done, text: status.update(f"{line}: {text}"),
        )
    ways = {way.way: {"longest": way.longest, "terms": dict(way.terms)} for way in found.ways}
    return {**asdict(line), **made_with, "ways": ways}


def main(
    line: Annotated[list[str] | None, typer.Option(help="Only this line; repeatable.")] = None,
) -> None:
    """Plan the lines that the results file lacks, and print all of them beside the paper's."""
    progress = Console(stderr=True)
    report: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for one in lines():
        if str(one) in report if line is None else str(one) not in line:
            continue
        report[str(one)] = planned(one, progress)
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")
        progress.print(f"{one}: done", highlight=False)
    Console().print(_table(report))


def _table(report: dict[str, Any]) -> Table:
    table = Table(title="Longest sequence, thousands of tokens: the paper's, and ours")
    table.add_column("line")
    for way in (EAGER, CHECKPOINTING, STREAMED):
        table.add_column(f"{way}: paper", justify="right")
        table.add_column("ours", justify="right")
    for name, row in ((str(one), report[str(one)]) for one in lines() if str(one) in report):
        cells = []
        published = PUBLISHED[row["objective"]][row["size"]]
        for way, figure in zip((EAGER, CHECKPOINTING, STREAMED), published, strict=True):
            cells += [f"{figure:g}", f"{row['ways'][way]['longest'] / 1000:.1f}"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    typer.run(main)

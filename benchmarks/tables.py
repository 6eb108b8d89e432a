"""A results file as tables for a reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20
KIB = 2**10

Cells = list[tuple[str, str]]
"""One row's cells: heading and text."""


def _mib(size: float) -> str:
    return f"{size / MIB:.1f}"


def _spread(quartiles: dict[str, float]) -> str:
    return f"{quartiles['median']:.3f} ({quartiles['lower']:.3f} to {quartiles['upper']:.3f})"


def _memory(job: dict[str, Any], result: dict[str, Any]) -> Cells:
    return [
        ("peak MiB", _mib(result["peak"])),
        ("live before MiB", _mib(result["live_before"])),
        ("live after MiB", _mib(result["live_after"])),
    ]


def _resident(job: dict[str, Any], result: dict[str, Any]) -> Cells:
    return [
        ("peak resident MiB", _mib(result["peak"])),
        ("before the first call MiB", _mib(result["before"])),
    ]


def _time(job: dict[str, Any], result: dict[str, Any]) -> Cells:
    return [
        ("ratio to gradient checkpointing", _spread(result["ratio"])),
        ("seconds", _spread(result["seconds"][job["mode"]])),
    ]


def _phases(job: dict[str, Any], result: dict[str, Any]) -> Cells:
    spent = {**result["phases"], **result["kinds"]}
    return [(f"{name} s", f"{seconds:.2f}") for name, seconds in sorted(spent.items())]


def _compile(job: dict[str, Any], result: dict[str, Any]) -> Cells:
    return [
        ("compile s", f"{result['compile']:.1f}"),
        ("first step s", f"{result['first']:.1f}"),
        ("warm step s", f"{result['warm']:.2f}"),
        ("first step of a second process s", f"{result['second']['first']:.1f}"),
        ("which compiled", str(result["second"]["bodies"]["miss"])),
    ]


def _optimizer(job: dict[str, Any], result: dict[str, Any]) -> Cells:
    return [
        ("peak MiB", _mib(result["peak"])),
        ("largest gradient MiB", _mib(result["largest"])),
        ("all gradients MiB", _mib(result["gradients"])),
    ]


TABLES: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Any]], Cells]]] = {
    "memory": ("Memory of a step above its start, and live bytes", _memory),
    "resident": ("Resident size of a fresh process", _resident),
    "time": ("Time of a step, paired; median and quartiles", _time),
    "phases": ("Where the time goes", _phases),
    "compile": ("Compile time with empty caches", _compile),
    "optimizer": ("An optimizer step in backward, gradients freed", _optimizer),
}


def print_tables(report: dict[str, Any], console: Console) -> None:
    """Print one table for each part that ``report`` has measurements of, and the growth."""
    for part, (title, cells_of) in TABLES.items():
        rows = [
            (measured["job"], cells_of(measured["job"], measured["result"]))
            for measured in report["measurements"]
            if measured["job"]["part"] == part and measured["result"] is not None
        ]
        if rows:
            console.print(_table(title, rows))
    if report["growth"]:
        grown = [
            (
                {"mode": row["mode"], "layers": row["layers"], "tokens": row["to"]},
                [("KiB a token", f"{row['bytes_per_token'] / KIB:.2f}")],
            )
            for row in report["growth"]
        ]
        console.print(_table("Growth of the peak, up to this length", grown))


def _table(title: str, rows: list[tuple[dict[str, Any], Cells]]) -> Table:
    table = Table(title=title, title_justify="left")
    headings = list(dict.fromkeys(heading for _, cells in rows for heading, _ in cells))
    table.add_column("mode")
    for heading in ("layers", "tokens", *headings):
        table.add_column(heading, justify="right")
    for job, cells in rows:
        texts = dict(cells)
        table.add_row(
            job["mode"],
            str(job["layers"]),
            str(job["tokens"]),
            *(texts.get(heading, "-") for heading in headings),
        )
    return table

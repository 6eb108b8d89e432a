"""All peers' measurements as one table: a row for each peer and configuration."""

from __future__ import annotations

from typing import Any

from rich.table import Table

MIB = 2**20

Row = dict[str, Any]
"""A saved measurement, and ``peer``, what a reader calls what was measured."""


def table(rows: list[Row]) -> Table:
    """Peak, time ratio to gradient checkpointing and gradient error, side by side."""
    joined: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        job = row["job"]
        objective = job["objective"] if job["objective"] in ("dpo", "grpo") else "sft"
        key = (job["layers"], job["vocabulary"], objective, job["tokens"], row["peer"])
        joined.setdefault(key, {})[job["part"]] = _cell(job["part"], row)
    shown = Table(title="One training step", title_justify="left")
    for heading in ("layers", "vocabulary", "objective", "tokens", "peer"):
        shown.add_column(heading)
    for heading in ("peak MiB", "time ratio to gc", "gradient error"):
        shown.add_column(heading, justify="right")
    for key, cells in sorted(joined.items()):
        texts = [cells.get(part, "-") for part in ("memory", "time", "exactness")]
        shown.add_row(*(str(value) for value in key), *texts)
    return shown


def _cell(part: str, row: Row) -> str:
    result = row["result"]
    if result is None:
        return "failed"
    if part == "memory":
        return f"{result['peak'] / MIB:.1f}"
    if part == "time":
        ratio = result["ratio"]
        return f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})"
    return f"{result['error']:.1e}"

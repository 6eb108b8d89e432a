"""``streambp demo``: one step of a small model in four ways."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape

from ..demo import GRADIENT_TOLERANCE, VARIANTS, Demo, DemoConfig, Row
from .layout import plain_table, titled

MIB = 2**20


def demo(
    tokens: Annotated[int, typer.Option(min=2, help="Length of the sequence.")] = DemoConfig.tokens,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = DemoConfig.layers,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Train a small model one step in four ways, and compare memory, time and gradients.

    The ways are eager, gradient checkpointing, torch.compile and this backend.
    All run on the CPU, and two of them compile first: that takes minutes. The
    last line says whether the streamed gradient is right.

    \b
        streambp demo
        streambp demo --tokens 8192 --layers 2 --json

    Exits with 0 if it is, with 1 if the streamed step failed or its gradient is
    off, with 2 if transformers, which the model comes from, is not installed.
    """
    progress = Console(stderr=True)
    if find_spec("transformers") is None:
        progress.print(escape("The demo's model needs: pip install 'streambp-fx[transformers]'"))
        raise typer.Exit(2)
    config = DemoConfig(tokens=tokens, layers=layers)
    rows: list[Row] = []
    with progress.status("building the model") as status:
        for row in Demo(config, on_progress=lambda text: status.update(escape(text))).rows():
            rows.append(row)
            outcome = "done" if row.failure is None else "failed"
            progress.print(
                f"{len(rows)} of {len(VARIANTS)}: {VARIANTS[row.variant]}: {outcome}", markup=False
            )
    streamed = next(row for row in rows if row.variant == "streambp")
    if as_json:
        report = {"config": asdict(config), "rows": [asdict(row) for row in rows]}
        typer.echo(json.dumps(report | {"ok": streamed.right}, indent=2))
    else:
        console = Console()
        console.print(_table(config, rows))
        for row in rows:
            if row.failure is not None:
                console.print(f"{VARIANTS[row.variant]} failed: {row.failure}", markup=False)
        console.print(verdict(rows), markup=False, highlight=False)
    if not streamed.right:
        raise typer.Exit(1)


def _table(config: DemoConfig, rows: list[Row]) -> Group:
    table = plain_table("step", "peak MiB", "time ratio", "first s", "error")
    for row in rows:
        name = escape(VARIANTS[row.variant])
        if row.failure is not None:
            table.add_row(name, "[red]failed[/]")
        else:
            table.add_row(
                name, _peak(row), _ratio(row), _number(row.first_call, ".1f"), _error(row)
            )
    return titled(
        f"One training step: {config.layers} layers, width {config.width}, "
        f"vocabulary {config.vocabulary}, {config.tokens} tokens, fp32",
        table,
        "Peak: bytes above the step's start, gradients allocated. Time: median of paired "
        "ratios to gradient checkpointing, and quartiles. First: seconds of the first call, with "
        "compiling. Error: the worst parameter's relative gradient error, against eager in fp64.",
    )


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _peak(row: Row) -> str:
    return "-" if row.peak is None else f"{row.peak / MIB:.1f}"


def _ratio(row: Row) -> str:
    ratio = row.time_ratio
    if ratio is None:
        return "-"
    if row.variant == "gc":
        return "1"
    return f"{ratio.median:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})"


def _error(row: Row) -> str:
    text = _number(row.gradient_error, ".1e")
    return text if row.right else f"[red]{text} (over {GRADIENT_TOLERANCE:.0e})[/]"


def verdict(rows: list[Row]) -> str:
    """One line that says whether the streamed step is right and what it saves."""
    by_variant = {row.variant: row for row in rows}
    streamed, checkpointed = by_variant["streambp"], by_variant["gc"]
    if streamed.failure is not None:
        return "FAILED: the streamed step did not run"
    if not streamed.right:
        error = _number(streamed.gradient_error, ".1e")
        return f"FAILED: the streamed gradient is off by {error}, over {GRADIENT_TOLERANCE:.0e}"
    line = f"OK: the streamed gradient is exact to {_number(streamed.gradient_error, '.1e')}"
    if streamed.peak is not None and checkpointed.peak is not None:
        line += f"; peak {_peak(streamed)} MiB, gradient checkpointing {_peak(checkpointed)} MiB"
    return line

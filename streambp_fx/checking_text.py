"""The outcome of a check as a table by parameter."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .checking import Check, Row

WIDEST = 400
MOST_ROWS = 40
"""Parameters that a table has at most: those that are wrong, then those farthest apart."""


def to_text(outcome: Check) -> str:
    """What ``print(check(...))`` shows, without colours."""
    console = Console(file=io.StringIO(), record=True)
    print_check(outcome, console)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()).strip()


def print_check(outcome: Check, console: Console) -> None:
    """Print the outcome, no name broken where the lines are read by no terminal."""
    table = _table(outcome)
    if not console.is_terminal:
        needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
        console.width = max(console.width, needed)
    console.print(_with_text(outcome, table))


def _table(outcome: Check) -> Table:
    shown = sorted(outcome.rows, key=lambda row: (row.right, -row.fp64_apart))[:MOST_ROWS]
    order = {row.name: index for index, row in enumerate(outcome.rows)}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("gradient of", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for heading in ("apart", "eager's error", "streamed error", "apart in fp64"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sorted(shown, key=lambda row: order[row.name]):
        table.add_row(*_cells(row), style=None if row.right else "red")
    return table


def _with_text(outcome: Check, table: Table) -> RenderableType:
    parts: list[RenderableType] = [
        Text("apart: streamed from eager. Errors: from eager in fp64. All relative.", style="dim"),
        table,
    ]
    if table.row_count < len(outcome.rows):
        left_out = len(outcome.rows) - table.row_count
        parts.append(Text(f"and {left_out} more, closer together in fp64"))
    parts += [Text(), _losses(outcome)]
    parts += [Text(f"not streamed: {problem}", style="red") for problem in outcome.problems]
    if outcome.chunks < 2:
        parts.append(
            Text("No loop had two chunks: give a chunk_size below the length to try chunking.")
        )
    parts.append(Text(verdict(outcome), style="bold" if outcome.right else "bold red"))
    return Group(*parts)


def _cells(row: Row) -> tuple[str, ...]:
    errors = (row.apart, row.eager_error, row.streamed_error, row.fp64_apart)
    shape = "x".join(map(str, row.shape)) or "scalar"
    return (row.name, shape, row.dtype, *(f"{error:.1e}" for error in errors))


def _losses(outcome: Check) -> Text:
    return Text(
        f"loss: eager {outcome.loss:.9g}, streamed {outcome.loss_streamed:.9g}; "
        f"in fp64: eager {outcome.loss_fp64:.15g}, streamed {outcome.loss_fp64_streamed:.15g}"
    )


def verdict(outcome: Check) -> str:
    """One line that says whether the streamed step is right."""
    worst = max((row.fp64_apart for row in outcome.rows), default=0.0)
    limit = f"the limit is {outcome.fp64_tolerance:.1e}"
    if outcome.narrowest != "float64":
        limit += f", since the program itself computes in {outcome.narrowest} in places"
    if outcome.right:
        return f"OK: in fp64, gradients are apart by {worst:.1e} at most; {limit}"
    wrong = [row.name for row in outcome.rows if not row.right]
    if not wrong:
        return f"FAILED: the losses differ in fp64; {limit}"
    return f"FAILED: {len(wrong)} gradients are wrong, {wrong[0]} among them; {limit}"

"""How commands print tables: without boxes, as `explain` and `check` do."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def plain_table(first: str, *numbers: str) -> Table:
    """A table without rows: a column of names, and columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def titled(title: str, table: Table, meaning: str | None = None) -> Group:
    """``table`` below its title and below what its columns mean; an empty line ends it."""
    parts: list[RenderableType] = [Text(title, style="bold cyan")]
    if meaning is not None:
        parts.append(Text(meaning, style="dim"))
    return Group(*parts, table, Text())

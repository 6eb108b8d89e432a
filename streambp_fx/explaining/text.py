"""The report as tables, for a terminal and for a notebook."""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .regions import Region
from .units import bytes_text, first_few, places_text, share_text, short_source

if TYPE_CHECKING:
    from ..passes.barrier import Barrier
    from .explanation import ExplainedGraph, Explanation

NOTEBOOK_WIDTH = 100
PASSED = ("chunk", "whole", "past", "sum", "size")
"""The ways in which operands are passed, in the order of a report."""
SEVERAL_GRAPHS = (
    "The program breaks into several graphs. The memory of each is counted alone, without what the "
    "others keep for their backward: a step takes more."
)
# A size of its own: with several families browsers do not take their smaller one for monospace.
_FONT = "font:13px/1.25 Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace"
_PRE = f'<pre style="white-space:pre;overflow-x:auto;{_FONT}">{{code}}</pre>'
_WRAPPED = f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere;{_FONT}">{{code}}</pre>'


def to_text(explanation: Explanation) -> str:
    """What ``print(explanation)`` shows: tables without colours, as wide as the terminal."""
    console = Console(file=io.StringIO(), record=True)
    console.print(to_renderable(explanation))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()).strip()


def to_notebook(explanation: Explanation) -> str:
    """The same tables as HTML with colours, and the rest of the report one click away."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=NOTEBOOK_WIDTH,
        force_terminal=True,
        legacy_windows=False,
    )
    console.print(to_renderable(explanation))
    tables: str = console.export_html(inline_styles=True, code_format=_PRE)
    details = "".join(
        f"<details><summary>{html.escape(region.name)}: operands and source lines</summary>"
        f"{_WRAPPED.format(code=html.escape(_region_text(region)))}</details>"
        for graph in explanation.graphs
        for region in _distinct(graph.regions)
    )
    return f"<div>{tables}{details}</div>"


def to_renderable(explanation: Explanation) -> RenderableType:
    """The report as an object that rich prints."""
    parts: list[RenderableType] = [Text(explanation.program, style="bold"), Text()]
    several = len(explanation.graphs) > 1
    if several:
        parts += [Text(SEVERAL_GRAPHS, style="red"), Text()]
    for number, graph in enumerate(explanation.graphs):
        if several:
            parts.append(Text(f"graph {number} of {len(explanation.graphs)}", style="bold"))
        parts += _graph(graph)
    parts += _memory(explanation)
    return Group(*parts)


def _graph(graph: ExplainedGraph) -> Iterator[RenderableType]:
    if graph.unstreamed is not None:
        yield Text(f"Nothing is streamed: {graph.unstreamed}", style="bold red")
    if graph.regions:
        yield _titled("Loops, in the order in which they run", _loops(graph))
        if graph.head_fused:
            yield Text(f"{_fused_head(graph)}\n")
        yield _titled("What the loops of each body are given, and its source lines", _given(graph))
        yield _titled("Why the order of each loop is valid", _reasons(graph))
    if graph.attentions:
        yield _titled("Attention", _attentions(graph))
    if graph.barriers:
        yield _titled("Barriers: what runs on the whole sequence", _barriers(graph))
    elif graph.unstreamed is None:
        yield Text("Barriers: none, all ops that grow with the sequence are streamed\n")
    if graph.notes:
        yield _titled("Notes", Group(*(Text(note) for note in graph.notes)))


def _titled(title: str, table: RenderableType) -> Group:
    return Group(Text(title, style="bold cyan"), table, Text())


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def _loops(graph: ExplainedGraph) -> Table:
    """Loops with one body in a row, layers in between left out."""
    table = _table()
    for heading, side in (
        ("loop", "left"),
        ("body", "left"),
        ("ops", "right"),
        ("chunks", "right"),
        ("order", "left"),
    ):
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    shared = Counter(region.body for region in graph.regions)
    for group in body_runs(graph.regions):
        region = group[0]
        table.add_row(
            _span([member.name for member in group]) + (", head" if region.head else ""),
            f"{region.body} (x{shared[region.body]})" if shared[region.body] > 1 else region.body,
            str(region.calls),
            f"{region.chunks} of <={region.chunk_size}",
            region.order,
        )
    return table


def _fused_head(graph: ExplainedGraph) -> str:
    """Where the head's backward is, which has no loop of its own."""
    heads = [region.name for region in graph.regions if region.head and not region.backward]
    return f"The head's backward runs in the loop of its forward, {', '.join(heads)}."


def _given(graph: ExplainedGraph) -> Table:
    """The operands of the first loop of each body, by how they are passed."""
    table = _table()
    table.add_column("loop", no_wrap=True)
    table.add_column("given", no_wrap=True)
    table.add_column("operands, and the source lines of the ops", overflow="fold")
    for region in _distinct(graph.regions):
        rows = [(how, first_few(names)) for how, names in _operands(region).items()]
        rows.append(("from", places_text(region.sources)))
        for index, (how, names) in enumerate(rows):
            table.add_row("" if index else region.name, how, names)
    return table


def _operands(region: Region) -> dict[str, list[str]]:
    """The names of a loop's operands by how they are passed, how many first: ``12 whole``."""
    found = {}
    for how in PASSED:
        names = Counter(operand.name for operand in region.operands if operand.how == how)
        if names:
            found[f"{names.total()} {how}"] = [
                f"{name} (x{count})" if count > 1 else name for name, count in names.items()
            ]
    return found


def body_runs(regions: tuple[Region, ...]) -> list[list[Region]]:
    """Loops with one body and one position in their layer together, in the order of the first.

    The loops of a layer alternate where it has several (keys and values, then the rest), so that
    what repeats is not next to each other.
    """
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        groups.setdefault((region.body, region.backward, region.chunk_size), []).append(region)
    return list(groups.values())


def _distinct(regions: tuple[Region, ...]) -> list[Region]:
    return [group[0] for group in body_runs(regions)]


def _span(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _reasons(graph: ExplainedGraph) -> Table:
    table = _table()
    table.add_column("loops", overflow="fold", max_width=40)
    table.add_column("because", overflow="fold")
    reasons: dict[str, list[str]] = {}
    for region in graph.regions:
        reasons.setdefault(region.reason, []).append(region.name)
    for reason, names in reasons.items():
        table.add_row(first_few(names), reason)
    return table


def _attentions(graph: ExplainedGraph) -> Group:
    groups: dict[tuple[str, int | None, str], list[str]] = {}
    for proof in graph.attentions:
        key = (proof.structure, proof.window, proof.source)
        groups.setdefault(key, []).append(proof.name)
    parts: list[RenderableType] = []
    for (structure, window, source), names in groups.items():
        seen = f"{structure}; window of {window}" if window is not None else structure
        parts += [Text(f"{first_few(names)}: {seen}"), _indented(Text(short_source(source)))]
    return Group(*parts)


def _barriers(graph: ExplainedGraph) -> Group:
    """The ops of each source line under it; the line has the width of the whole."""
    by_source: dict[str, list[Barrier]] = {}
    for barrier in graph.barriers:
        by_source.setdefault(barrier.source, []).append(barrier)
    parts: list[RenderableType] = []
    for source, barriers in by_source.items():
        parts += [Text(short_source(source)), _indented(_ops(barriers))]
    return Group(*parts)


def _ops(barriers: Sequence[Barrier]) -> Table:
    """A row for those that are alike."""
    table = _table()
    table.show_header = False
    table.add_column("op", style="red", overflow="fold")
    table.add_column("direction", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for barrier, count in Counter(barriers).items():
        direction = "backward" if barrier.backward else "forward"
        times = f" (x{count})" if count > 1 else ""
        size = bytes_text(barrier.bytes) if barrier.bytes else ""
        table.add_row(barrier.op + times, direction, size, barrier.reason)
    return table


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 4))


def _memory(explanation: Explanation) -> Iterator[RenderableType]:
    peak = explanation.peak
    where = f"{'backward' if peak.backward else 'forward'}, at {peak.node}"
    table = _table()
    table.add_column("term")
    table.add_column("predicted", justify="right")
    table.add_column("share", justify="right")
    for term, size in peak.terms().items():
        table.add_row(str(term), bytes_text(size), share_text(size, peak.nbytes))
    table.add_row("all", bytes_text(peak.nbytes), "", style="bold")
    yield _titled(f"Memory above the step's start, at its peak ({where})", table)
    if not explanation.peers:
        return
    table = _table()
    table.add_column("way")
    table.add_column("predicted peak", justify="right")
    table.add_column("times ours", justify="right")
    for name, found in explanation.peers.items():
        if isinstance(found, int):
            table.add_row(name, bytes_text(found), f"{found / peak.nbytes:.1f}")
        else:
            table.add_row(name, "-", found)
    table.add_row('backend="streambp"', bytes_text(peak.nbytes), "1", style="bold")
    yield _titled("The same step in other ways", table)


def _region_text(region: Region) -> str:
    lines = [f"{region.order}, {region.chunks} chunks of {region.chunk_size}: {region.reason}", ""]
    for operand in region.operands:
        dim = "" if operand.dim is None else f" of dim {operand.dim}"
        shape = "x".join(map(str, operand.shape))
        lines.append(f"{operand.how}{dim}: {operand.name} [{shape}]")
    lines += ["", *(f"result {result}" for result in region.results), ""]
    return "\n".join([*lines, *(short_source(source) for source in region.sources)])

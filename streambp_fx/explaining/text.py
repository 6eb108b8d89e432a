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
    from .explanation import Capture, ExplainedGraph, Explanation
    from .proofs import AttentionProof

NOTEBOOK_WIDTH = 100
PASSED = ("chunk", "whole", "past", "sum", "size")
"""The ways in which operands are passed, in the order of a report."""
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
    captures = explanation.captures
    for number, capture in enumerate(captures):
        if len(captures) > 1:
            parts.append(Text(f"graph {number} of {len(captures)}", style="bold"))
        parts += _capture(capture)
    parts += _memory(explanation)
    return Group(*parts)


def _capture(capture: Capture) -> Iterator[RenderableType]:
    graphs = capture.segments
    regions = [region for graph in graphs for region in graph.regions]
    unstreamed = [graph for graph in graphs if graph.unstreamed is not None]
    barriers = [*capture.barriers, *(barrier for graph in graphs for barrier in graph.barriers)]
    notes = [*capture.notes, *(note for graph in graphs for note in graph.notes)]
    proofs = [proof for graph in graphs for proof in graph.attentions]
    for graph in unstreamed:
        text = f"othing is streamed: {graph.unstreamed}"
        start = "N" if len(graphs) == 1 else f"Segments {_numbers(graph.segments)}: n"
        yield Text(start + text, style="bold red")
    if regions:
        yield _titled("Loops, segment by segment; equal segments share them", _loops(graphs))
        for graph in graphs:
            if graph.head_fused:
                yield Text(f"{_fused_head(graph)}\n")
        yield _titled("What loops of each body are given, and its source lines", _given(regions))
        yield _titled("Why the order of each loop is valid", _reasons(regions))
    if proofs:
        yield _titled("Attention", _attentions(proofs))
    if barriers:
        yield _titled("Barriers: what runs on the whole sequence", _barriers(barriers))
    elif not unstreamed:
        yield Text("Barriers: none, all ops that grow with the sequence are streamed\n")
    if notes:
        yield _titled("Notes", Group(*(Text(note) for note in notes)))


def _numbers(segments: Sequence[int]) -> str:
    """``1``, ``1 to 22``, or ``1, 3, 5``."""
    first, last = segments[0], segments[-1]
    if len(segments) > 2 and last - first == len(segments) - 1:
        return f"{first} to {last}"
    return ", ".join(map(str, segments))


def _titled(title: str, table: RenderableType) -> Group:
    return Group(Text(title, style="bold cyan"), table, Text())


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def _loops(graphs: Sequence[ExplainedGraph]) -> Table:
    """Loops with one body in a row, layers in between left out."""
    table = _table()
    for heading, side in (
        ("loop", "left"),
        ("segments", "left"),
        ("body", "left"),
        ("ops", "right"),
        ("chunks", "right"),
        ("order", "left"),
    ):
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    for graph in graphs:
        shared = Counter(region.body for region in graph.regions)
        for group in body_runs(graph.regions):
            region, count = group[0], shared[group[0].body]
            # Of a graph that is not cut, loops have the numbers.
            segments = graph.segments if len(group) == 1 else [one.layer for one in group]
            if len(graphs) == 1 and len(group) == 1:
                segments = [region.layer]
            table.add_row(
                _span([member.name for member in group]) + (", head" if region.head else ""),
                _numbers(segments),
                f"{region.body} (x{count})" if count > 1 else region.body,
                str(region.calls),
                f"{region.chunks} of <={region.chunk_size}",
                region.order,
            )
    return table


def _fused_head(graph: ExplainedGraph) -> str:
    """Where the head's backward is, which has no loop of its own."""
    heads = [region.name for region in graph.regions if region.head and not region.backward]
    return f"The head's backward runs in the loop of its forward, {', '.join(heads)}."


def _given(regions: Sequence[Region]) -> Table:
    """The operands of the first loop of each body, by how they are passed."""
    table = _table()
    table.add_column("loop", no_wrap=True)
    table.add_column("given", no_wrap=True)
    table.add_column("operands, and the source lines of the ops", overflow="fold")
    for region in _distinct(regions):
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


def body_runs(regions: Sequence[Region]) -> list[list[Region]]:
    """Loops with one body and one position in their layer together, in the order of the first.

    The loops of a layer alternate where it has several (keys and values, then the rest), so that
    what repeats is not next to each other.
    """
    groups: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        groups.setdefault((region.body, region.backward, region.chunk_size), []).append(region)
    return list(groups.values())


def _distinct(regions: Sequence[Region]) -> list[Region]:
    return [group[0] for group in body_runs(regions)]


def _span(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _reasons(regions: Sequence[Region]) -> Table:
    table = _table()
    table.add_column("loops", overflow="fold", max_width=40)
    table.add_column("because", overflow="fold")
    reasons: dict[str, list[str]] = {}
    for region in regions:
        reasons.setdefault(region.reason, []).append(region.name)
    for reason, names in reasons.items():
        table.add_row(first_few(names), reason)
    return table


def _attentions(proofs: Sequence[AttentionProof]) -> Group:
    groups: dict[tuple[str, int | None, str], list[str]] = {}
    for proof in proofs:
        key = (proof.structure, proof.window, proof.source)
        groups.setdefault(key, []).append(proof.name)
    parts: list[RenderableType] = []
    for (structure, window, source), names in groups.items():
        seen = f"{structure}; window of {window}" if window is not None else structure
        parts += [Text(f"{first_few(names)}: {seen}"), _indented(Text(short_source(source)))]
    return Group(*parts)


def _barriers(barriers: Sequence[Barrier]) -> Group:
    """The ops of each source line under it; the line has the width of the whole."""
    by_source: dict[str, list[Barrier]] = {}
    for barrier in barriers:
        by_source.setdefault(barrier.source, []).append(barrier)
    parts: list[RenderableType] = []
    for source, alike in by_source.items():
        parts += [Text(short_source(source)), _indented(_ops(alike))]
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

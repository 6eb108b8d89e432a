"""The report as one HTML page that needs no other file and no network.

Given:  an explanation
Result: ``page.html`` with the report's data in it; the page's own script draws it
"""

from __future__ import annotations

import html
import json
from collections import deque
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ..passes.loops import StreamLoop
from ..passes.placement import source_of
from .data import as_data, changing_moments, thinned, visible_terms
from .plots import COLORS, OURS, PEER_COLORS

if TYPE_CHECKING:
    from .explanation import ExplainedGraph, Explanation

TITLE, DATA = "STREAMBP_TITLE", "STREAMBP_DATA"
"""What stands in the template for the title and the data."""


def to_page(explanation: Explanation) -> str:
    """The text of the page."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(_page_data(explanation), separators=(",", ":"))
    # Inside of a script element nothing is escaped, so that only its end must not appear.
    data = data.replace("</", "<\\/").replace("<!--", "<\\!--")
    return template.replace(TITLE, html.escape(explanation.program)).replace(DATA, data)


def _page_data(explanation: Explanation) -> dict[str, Any]:
    data = as_data(explanation)
    for graph_data, graph in zip(data["graphs"], explanation.graphs, strict=True):
        for barrier, after in zip(graph_data["barriers"], _places(graph), strict=True):
            barrier["after"] = after
    courses = explanation.peer_courses.items()
    moments = changing_moments(explanation)
    return data | {
        "colors": {str(term): COLORS[term] for term in visible_terms(moments)},
        "timeline": [
            {
                "at": moment.node,
                "in_backward": moment.backward,
                "terms": {str(term): size for term, size in moment.terms().items()},
            }
            for moment in moments
        ],
        "courses": [
            {"name": name, "color": color, "bytes": thinned(course)}
            for (name, course), color in zip(courses, PEER_COLORS, strict=False)
        ]
        + [
            {
                "name": 'backend="streambp"',
                "color": OURS,
                "bytes": thinned([moment.nbytes for moment in moments]),
            }
        ],
    }


def _places(graph: ExplainedGraph) -> list[str | None]:
    """For each barrier, the loop of its direction after which it runs; ``None`` if not known.

    Before the first loop of a direction that is ``""``.
    """
    places: dict[tuple[str, str, bool], deque[str]] = {}
    for name in ("forward", "backward"):
        graph_module, last = graph.graphs.get(name), ""
        for node in graph_module.graph.nodes if graph_module is not None else ():
            if isinstance(node.target, StreamLoop):
                last = node.meta["loop"].name
            elif node.op == "call_function":
                key = (str(node.target), source_of(node), name == "backward")
                places.setdefault(key, deque()).append(last)
    found: list[str | None] = []
    for barrier in graph.barriers:
        # Nodes have other names after the rewrite. What one line makes in several layers, or
        # several times, is in the order in which the barriers were found.
        alike = places.get((barrier.op, barrier.source, barrier.backward))
        found.append(alike.popleft() if alike else None)
    return found

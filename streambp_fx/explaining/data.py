"""A report as values that JSON has: for ``streambp explain --json`` and for the page."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..passes.barrier import Barrier
from .regions import Region
from .step_memory import Moment
from .terms import Term

if TYPE_CHECKING:
    from .explanation import Capture, ExplainedGraph, Explanation

COURSE_POINTS = 600
"""How many points of a course of memory a reader is given at most."""
VISIBLE = 1 / 300
"""The share of a picture's height below which nothing is seen of a term."""


def as_data(explanation: Explanation) -> dict[str, Any]:
    """Everything that `Explanation` says but its graphs. Bytes are integers."""
    peak = explanation.peak
    return {
        "program": explanation.program,
        "options": {name: str(value) for name, value in explanation.options.items()},
        "streams_everything": explanation.streams_everything,
        "peak": {
            "bytes": peak.nbytes,
            "at": peak.node,
            "in_backward": peak.backward,
            "terms": {str(term): size for term, size in peak.terms().items()},
        },
        "peers": dict(explanation.peers),
        "captures": [_capture(capture) for capture in explanation.captures],
        "graphs": [
            _graph(graph) | {"capture": number}
            for number, capture in enumerate(explanation.captures)
            for graph in capture.segments
        ],
    }


def _capture(capture: Capture) -> dict[str, Any]:
    return {
        "barriers": [_barrier(barrier) for barrier in capture.barriers],
        "notes": list(capture.notes),
        "seconds": dict(capture.seconds),
        "graphs": list(capture.graphs),
    }


def _graph(graph: ExplainedGraph) -> dict[str, Any]:
    return {
        "segments": list(graph.segments),
        "unstreamed": graph.unstreamed,
        "head_fused": graph.head_fused,
        "loops": [_loop(region) for region in graph.regions],
        "bodies": {name: list(lines) for name, lines in graph.bodies.items()},
        "barriers": [_barrier(barrier) for barrier in graph.barriers],
        "attentions": [dataclasses.asdict(proof) for proof in graph.attentions],
        "notes": list(graph.notes),
        "seconds": dict(graph.seconds),
        "graphs": list(graph.graphs),
    }


def _loop(region: Region) -> dict[str, Any]:
    data = dataclasses.asdict(region)
    for operand in data["operands"]:
        operand["shape"] = list(operand["shape"])
        operand["dtype"] = dtype_name(operand["dtype"])
    return data


def _barrier(barrier: Barrier) -> dict[str, Any]:
    return dataclasses.asdict(barrier)


def dtype_name(dtype: object) -> str | None:
    """``"float32"`` for ``torch.float32``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def changing_moments(explanation: Explanation) -> list[Moment]:
    """The moments of a step in order, without those at which memory is as it was before.

    A step ends with what it began with: the gradients that backward returned have been added to
    those of the parameters, which count nothing.
    """
    found: list[Moment] = []
    moments = explanation.memory.moments
    end = [Moment("the end", True, ())] if moments and moments[-1].backward else []
    for moment in [*moments, *end]:
        if not found or moment.terms() != found[-1].terms():
            found.append(moment)
    return found


def visible_terms(moments: Sequence[Moment]) -> list[Term]:
    """The terms that a picture of ``moments`` shows: others are thinner than a line."""
    highest = max((moment.nbytes for moment in moments), default=0)
    most = Counter[Term]()
    for moment in moments:
        most |= Counter(moment.terms())
    return [term for term in Term if most[term] > VISIBLE * highest]


def thinned(course: Sequence[int], points: int = COURSE_POINTS) -> list[int]:
    """At most ``points`` of a course, each the most of its stretch, so that no peak is lost."""
    if len(course) <= points:
        return list(course)
    bounds = [index * len(course) // points for index in range(points + 1)]
    return [max(course[start:end]) for start, end in itertools.pairwise(bounds)]

"""The one place that says which backend the end-to-end tests compile with.

Loop bodies of most tests run op by op, which is quick and exact; users' are compiled. So Inductor
is also given each body that runs op by op, and turns it into a graph of its own: a body with
something that it can not take fails the test that made it. What follows, fusion and code, takes
most of the time and is left to the tests that compile bodies.

``STREAMBP_TEST_BACKEND=aot_eager`` checks the tests themselves against another right backend; tests
that read the report are skipped then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx import GraphModule

import streambp_fx
from streambp_fx._torch import GraphLowering
from streambp_fx.backend import Compilation
from streambp_fx.options import parse_options
from streambp_fx.passes.body import LoopBody
from streambp_fx.passes.lower import through_inductor
from streambp_fx.passes.lower_only import NOT_NEEDED

BACKEND = os.environ.get("STREAMBP_TEST_BACKEND", "streambp")

needs_report = pytest.mark.skipif(BACKEND != "streambp", reason="only streambp writes a report")


def streamed(
    function: Callable[..., Any],
    *,
    dynamic: bool | None = None,
    fresh: bool = True,
    lowered: bool = True,
    **options: Any,
) -> Any:
    """``function`` compiled with the backend under test; a module stays one.

    Starts from an empty Dynamo cache if ``fresh``. Loop bodies run op by op, and Inductor is asked
    about them if ``lowered``, unless ``compile_bodies=True`` is among ``options``.
    """
    if fresh:
        torch._dynamo.reset()
    if BACKEND != "streambp":
        return torch.compile(function, backend=BACKEND, dynamic=dynamic)
    options = {"compile_bodies": False, **options}
    backend: Any = streambp_lowered if lowered and not options["compile_bodies"] else BACKEND
    return torch.compile(function, backend=backend, dynamic=dynamic, options=options)


_lowered: set[Any] = set()
"""Bodies that Inductor has taken, by key and settings: it is asked about each once a process."""


def streambp_lowered(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, which asks Inductor about each body that runs op by op."""
    return _Lowering(parse_options(options, mode)).compile(graph_module, example_inputs)


class _Lowering(Compilation):
    def _run_graph(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in graph_module.graph.find_nodes(op="get_attr"):
            body = getattr(graph_module, str(node.target))
            if isinstance(body, LoopBody):
                _lower(body, self.inductor)
        return super()._run_graph(graph_module, inputs)


def _lower(body: LoopBody, settings: dict[str, Any]) -> None:
    """Have Inductor make its graph of ``body``, and neither schedule nor compile it.

    Raises:
        InductorError: it can not.
    """
    key = (body.key, repr(settings))
    if key in _lowered:
        return
    with patch.object(GraphLowering, "compile_to_module", _stop):
        through_inductor(body, {**settings, **NOT_NEEDED})
    _lowered.add(key)


def _stop(graph: GraphLowering) -> Any:
    """What stands for the code of a graph: a schedule of nothing, and a function."""
    graph.scheduler = SimpleNamespace(nodes=[])
    return SimpleNamespace(call=lambda inputs: ())


def last_report() -> Any:
    """The report of the last compilation."""
    return streambp_fx.last_report()


def assert_streamed_whole() -> None:
    """Fail if the last compilation left anything unstreamed, or streamed nothing.

    Does nothing with a stand-in backend.
    """
    if BACKEND != "streambp":
        return
    report = last_report()
    problems = "\n".join(report.problems())
    assert not problems, f"left unstreamed:\n{problems}"
    assert report.loops, "nothing was streamed"

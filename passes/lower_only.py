"""Lower graphs with Inductor and stop before their kernels are compiled.

Given:  a loop body
Result: Inductor's graph of it, and the Python code that Inductor writes around the kernels
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from streambp_fx._torch import GraphLowering

from .body import LoopBody
from .lower import through_inductor

NOT_NEEDED = {"fx_graph_cache": False, "compile_threads": 1}
"""Inductor's settings here: nothing is compiled, so neither a cache nor workers have a use."""


def without_compiling(
    function_of: Callable[[GraphLowering, str], Callable[[list[Any]], Any]],
) -> AbstractContextManager[Any]:
    """Have Inductor write code inside a with-block, and compile and load none of it.

    Kernels are chosen and written; compiling them is what takes most of the time. What stands for
    the loaded code is ``function_of(graph, wrapper_code)``, called with one list of inputs.
    """

    def keep(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        return SimpleNamespace(call=function_of(graph, code.value))

    return patch.object(GraphLowering, "compile_to_module", keep)


def lower_only(body: LoopBody, settings: dict[str, Any]) -> tuple[GraphLowering, str, list[Any]]:
    """Inductor's graph of ``body``, its wrapper code, and the fake inputs that it was traced with.

    ``settings`` are Inductor's.
    """
    lowered: list[tuple[GraphLowering, str]] = []

    def note(graph: GraphLowering, source: str) -> Callable[[list[Any]], Any]:
        lowered.append((graph, source))
        return lambda inputs: ()

    with without_compiling(note):
        _, inputs, _ = through_inductor(body, {**settings, **NOT_NEEDED})
    ((graph, source),) = lowered
    return graph, source, inputs

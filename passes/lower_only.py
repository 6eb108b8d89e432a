"""Lower a loop's body with Inductor and stop before its kernels are compiled.

Given:  a loop body
Result: Inductor's graph of it, and the Python code that Inductor writes around the kernels
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from streambp_fx._torch import (
    GraphLowering,
    TracingContext,
    backed_size_oblivious,
    compile_fx_inner,
    disable_current_modes,
    inductor_config,
    tracing,
)

from .body import LoopBody

NOT_NEEDED = {"fx_graph_cache": False, "compile_threads": 1}
"""Inductor's settings here: nothing is compiled, so neither a cache nor workers have a use."""


def lower_only(body: LoopBody, settings: dict[str, Any]) -> tuple[GraphLowering, str, list[Any]]:
    """Inductor's graph of ``body``, its wrapper code, and the fake inputs that it was traced with.

    ``settings`` are Inductor's. Kernels are chosen and written, and not compiled, which is what
    takes most of the time.
    """
    lowered: list[tuple[GraphLowering, str]] = []

    def keep(graph: GraphLowering) -> Any:
        code, _ = graph.codegen()
        lowered.append((graph, code.value))
        return SimpleNamespace(call=lambda args: ())

    with disable_current_modes():
        graph_module, mode = body.trace()
        inputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
        with (
            torch.no_grad(),
            inductor_config.patch({**settings, **NOT_NEEDED}),
            backed_size_oblivious(),
            tracing(TracingContext(mode)),
            patch.object(GraphLowering, "compile_to_module", keep),
        ):
            compile_fx_inner(graph_module, inputs)
    ((graph, source),) = lowered
    return graph, source, inputs

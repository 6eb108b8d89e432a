"""The passes on the graph that Dynamo captured, in order.

    equate_token_shapes  ids, labels and masks of one shape get one symbol a dim
    fix_floats           symbolic floats that are settings become constants
    compute_out_of_place  residual streams that are written in place become new values
    normalize_attention  attention becomes `streambp::attention`
    whole_outputs        what is returned large, and before the loss, is reported
    defer_outputs        what is returned beside a loss becomes deferred tensors
    slice_early          rows that a loss reads are taken before the head's product

They change the graph and the subgraphs of its higher-order ops in place. Where one fails,
`Untouched` brings back what was captured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from streambp_fx._torch import copied_graph, feeds_another_part

from .defer_outputs import Deferral, defer_outputs
from .equal_shapes import equate_token_shapes
from .fixed_floats import fix_floats
from .history import History, timed
from .kernel_choice import kernel_choices
from .normalize_attention import normalize_attention
from .out_of_place import compute_out_of_place
from .slice_early import slice_early
from .whole_outputs import whole_outputs

log = logging.getLogger("streambp_fx")


class Untouched:
    """The graphs of a module and of the modules in it, as they were at this object's making."""

    def __init__(self, graph_module: GraphModule) -> None:
        modules = [one for one in graph_module.modules() if isinstance(one, GraphModule)]
        self._graphs = [(one, copied_graph(one.graph)) for one in modules]

    def restore(self) -> None:
        """Give each module its graph back; to be called once."""
        for module, graph in self._graphs:
            module.graph = graph


def rewrite_captured(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    history: History,
    *,
    keep_outputs: bool,
) -> Deferral:
    """Rewrite ``graph_module`` in place.

    Args:
        graph_module: a graph as Dynamo hands it to a backend.
        example_inputs: the backend's second argument.
        keep_outputs: defer no output.

    Returns:
        The graph with fewer outputs, and the way back to the original ones.
    """
    history.keep("captured", graph_module)
    timed(history, "equate_token_shapes", lambda: equate_token_shapes(graph_module))
    timed(history, "fix_floats", lambda: fix_floats(graph_module))
    timed(history, "compute_out_of_place", lambda: compute_out_of_place(graph_module))
    timed(history, "normalize_attention", lambda: _normalize_attention(graph_module, history))
    history.keep("normalize_attention", graph_module)
    # The largest values that there are: told of first.
    history.barriers += timed(history, "whole_outputs", lambda: whole_outputs(graph_module))
    # What another part of the program reads may carry a gradient back.
    keep = keep_outputs or feeds_another_part(graph_module)
    deferral = timed(
        history,
        "defer_outputs",
        lambda: defer_outputs(graph_module, example_inputs, keep_outputs=keep),
    )
    history.keep("defer_outputs", graph_module)
    timed(history, "slice_early", lambda: slice_early(graph_module))
    history.keep("slice_early", graph_module)
    return deferral


def _normalize_attention(graph_module: GraphModule, history: History) -> None:
    choices = kernel_choices(graph_module)
    for choice in choices:
        log.warning("%s", choice)
    refusals = [f"attention stays written out: {r}" for r in normalize_attention(graph_module)]
    history.notes += choices + refusals

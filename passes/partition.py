"""Take the rewritten joint graph apart into the forward and backward that AOTAutograd runs.

What backward reads of forward is saved: the cuts, small prologue values, and parameters (which
are inputs). AOTAutograd's own extraction orders saved values and tangents.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from streambp_fx._torch import extract_fwd_bwd_modules

from .placement import value_of
from .rewrite import Rewritten


def split(rewritten: Rewritten, num_forward_outputs: int) -> tuple[GraphModule, GraphModule]:
    """The forward and backward graphs of a rewritten joint graph."""
    graph = rewritten.graph_module.graph
    saved: dict[Node, None] = {}
    sizes: dict[Node, None] = {}
    output = graph.output_node()
    results = output.args[0]
    backward_results = list(results)[num_forward_outputs:]  # type: ignore[arg-type]
    readers = [node for node in graph.nodes if node not in rewritten.forward_nodes]
    read = [arg for node in readers if node is not output for arg in node.all_input_nodes]
    read += [node for node in backward_results if isinstance(node, Node)]
    for node in read:
        if node not in rewritten.forward_nodes or "tangents" in str(node.target):
            continue
        if node.op == "get_attr":
            continue
        if isinstance(value_of(node), torch.Tensor):
            saved[node] = None
        else:
            sizes[node] = None
    return extract_fwd_bwd_modules(
        rewritten.graph_module, list(saved), list(sizes), num_forward_outputs
    )

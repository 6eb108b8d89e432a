"""Pass: bring the joint graph into the form the analyses expect.

Given:  ``b = alias(a); c = view(a, [6, 4]); d = view(a, [6, 4]); f(b, c, d)``
Result: ``c = view(a, [6, 4]); f(a, c, c)``

AOTAutograd marks what it saves with ``alias`` and repeats views for every use; both would hide
that two nodes are the same value.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from streambp_fx._torch import fx_graph_cse

aten = torch.ops.aten


def normalize(graph_module: GraphModule) -> GraphModule:
    """Remove aliases, common subexpressions and dead nodes; returns a new module."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (
            aten.alias.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
        ):
            source = node.args[0]
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    merged = fx_graph_cse(graph)
    return GraphModule(graph_module, merged)

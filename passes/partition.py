"""Take the rewritten joint graph apart into the forward and backward that AOTAutograd runs.

What backward reads of forward is saved: the cuts, small prologue values, and parameters (which
are inputs). AOTAutograd's own extraction orders saved values and tangents.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch.fx import GraphModule, Node

from streambp_fx._torch import extract_fwd_bwd_modules

from .dataflow import is_tangent
from .placement import value_of
from .rewrite import Rewritten


def split(
    rewritten: Rewritten, num_forward_outputs: int, changed: AbstractSet[str] = frozenset()
) -> tuple[GraphModule, GraphModule]:
    """The forward and backward graphs of a rewritten joint graph.

    ``changed`` has the names of the inputs that the program changes in place, once forward has run.
    Backward, which computes again from what forward read, gets copies of them.
    """
    graph = rewritten.graph_module.graph
    _copy_for_backward(rewritten, changed)
    saved: dict[Node, None] = {}
    sizes: dict[Node, None] = {}
    output = graph.output_node()
    results = output.args[0]
    backward_results = list(results)[num_forward_outputs:]  # type: ignore[arg-type]
    readers = [node for node in graph.nodes if node not in rewritten.forward_nodes]
    for node in readers:
        # Else an op that changes something in place is taken to belong to forward.
        node.meta["partitioner_tag"] = "is_backward"
    read = [arg for node in readers if node is not output for arg in node.all_input_nodes]
    read += [node for node in backward_results if isinstance(node, Node)]
    for node in read:
        if node not in rewritten.forward_nodes or is_tangent(node):
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


def _copy_for_backward(rewritten: Rewritten, changed: AbstractSet[str]) -> None:
    """Hand copies of the inputs in ``changed`` to the nodes of backward that read them."""
    graph = rewritten.graph_module.graph
    output = graph.output_node()
    inputs = list(graph.find_nodes(op="placeholder"))
    for source in [one for one in inputs if one.target in changed]:
        readers = [
            user
            for user in source.users
            if user not in rewritten.forward_nodes and user is not output
        ]
        if readers:
            with graph.inserting_after(inputs[-1]):
                copy = graph.call_function(torch.ops.aten.clone.default, (source,))
            copy.meta["val"] = value_of(source)
            rewritten.forward_nodes.add(copy)
            for reader in readers:
                reader.replace_input_with(source, copy)

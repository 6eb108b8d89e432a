"""Pass: symbolic floats that ops take as settings are constants.

Given:  ``eps = item(input)`` and ``layer_norm(x, sizes, weight, bias, eps)``
Result: ``layer_norm(x, sizes, weight, bias, 1e-05)``, and a guard

With ``dynamic=True`` every float that a module holds is symbolic. AOTAutograd keeps those that
enter arithmetic on tensors; ops take all others as numbers. It finds that out once it has traced
the joint graph, and then has Dynamo begin again, with those floats as constants: all of it is done
twice. Of the ops below it is known from the start.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from streambp_fx._torch import fixed_float, free_unbacked_symbols

from .dynamo_calls import argument_of, is_call

SETTINGS = {
    "embedding": ((4, "norm_type"),),
    "dropout": ((1, "p"),),
    "layer_norm": ((4, "eps"),),
    "rms_norm": ((3, "eps"),),
    "scaled_dot_product_attention": ((4, "dropout_p"), (6, "scale")),
}
"""By the name of a call, the position and name of each argument that its op takes as a number."""


def fix_floats(graph_module: GraphModule) -> None:
    """Put the numbers in place of symbolic floats that are settings and nothing else, in place."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_method", target="item"):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymFloat) or free_unbacked_symbols(value):
            continue
        if all(_sets(node, user) for user in node.users):
            node.replace_all_uses_with(fixed_float(value))
            graph.erase_node(node)
    graph_module.recompile()


def _sets(value: Node, call: Node) -> bool:
    """Whether ``call`` takes ``value`` as a setting, and nowhere else."""
    for name, settings in SETTINGS.items():
        if is_call(call, name):
            given = [argument_of(call, *place) for place in settings]
            taken = [*call.args, *call.kwargs.values()]
            return given.count(value) == taken.count(value) > 0
    return False

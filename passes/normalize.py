"""Pass: bring the joint graph into the form the analyses expect.

Given:  ``b = alias(a); c, d = view(a, [6, 4]), view(a, [6, 4]); n = sym_size(a, 1); f(b, c, d, n)``
Result: ``c = view(a, [6, 4]); f(a, c, c, s0)``, where ``s0`` is the input that holds the size

AOTAutograd marks what it saves with ``alias`` and repeats views for every use; both would hide
that two nodes are the same value. A size that is read from a tensor would make the tensor needed
whole, though the sizes of all values follow from those of the inputs.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import fx_graph_cse

from .placement import value_of
from .rules.sizes import expr_of

aten = torch.ops.aten
SAME_VALUE = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


def normalize(graph_module: GraphModule) -> GraphModule:
    """Remove aliases, sizes read from tensors, common subexpressions and dead nodes.

    Returns:
        A new module; the graph of ``graph_module`` is changed as well.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in SAME_VALUE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _take_sizes_from_inputs(graph)
    graph.eliminate_dead_code()
    merged = fx_graph_cse(graph)
    return GraphModule(graph_module, merged)


def _take_sizes_from_inputs(graph: Graph) -> None:
    sizes: dict[sympy.Expr, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(value_of(node), torch.SymInt):
            sizes.setdefault(expr_of(value_of(node)), node)
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        with graph.inserting_before(node):
            size = _size(graph, expr_of(value_of(node)), sizes)
        if size is not None:
            node.replace_all_uses_with(size)
            graph.erase_node(node)


def _size(graph: Graph, expr: sympy.Expr, sizes: dict[sympy.Expr, Node]) -> Any:
    """``expr`` as a number or a node; ``None`` if it is no sum or product of input sizes."""
    if expr.is_number:
        return int(expr)
    if expr in sizes:
        return sizes[expr]
    combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(expr.func)
    if combine is None:
        return None
    parts = [_size(graph, part, sizes) for part in expr.args]
    if None in parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        left, right = (value_of(n) if isinstance(n, Node) else n for n in (total, part))
        total = graph.call_function(combine, (total, part))
        total.meta["val"] = combine(left, right)
    sizes[expr] = total
    return total

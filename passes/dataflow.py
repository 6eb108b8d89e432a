"""Facts about a joint graph that several passes need: who depends on what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from streambp_fx._torch import pytree

from .placement import hint_of, value_of
from .rules.sizes import expr_of, product

aten = torch.ops.aten

VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.detach.default,
}
"""Ops whose result shares the memory of their first argument."""


@dataclass
class JointGraph:
    """A joint forward-backward graph with its outputs told apart.

    kept holds values that forward makes for backward alone, scaled what backward makes of them.
    forward_outputs and backward_outputs hold nodes, or constants and ``None`` (no gradient).
    dependent holds the nodes that depend on a tangent: the backward. Every other node is a pure
    function of the primals, and may be computed again wherever it is needed.
    """

    graph: Graph
    primals: list[Node]
    tangents: list[Node]
    forward_outputs: list[object]
    backward_outputs: list[object]
    dependent: set[Node]
    order: dict[Node, int]
    kept: list[Node] = field(default_factory=list)
    scaled: set[Node] = field(default_factory=set)


def is_tangent(node: Node) -> bool:
    """Whether ``node`` is a tangent among a graph's inputs; AOTAutograd names them so."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def read_joint(
    graph: Graph,
    num_forward_outputs: int,
    kept: Iterable[Node] = (),
    scaled: Iterable[Node] = (),
) -> JointGraph:
    """Tell the parts of a joint graph apart."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    tangents = [node for node in placeholders if is_tangent(node)]
    output = graph.output_node()
    flat, _ = pytree.tree_flatten(output.args[0])
    dependent = descendants(graph, tangents)
    return JointGraph(
        graph,
        [node for node in placeholders if node not in set(tangents)],
        tangents,
        list(flat[:num_forward_outputs]),
        list(flat[num_forward_outputs:]),
        dependent,
        {node: index for index, node in enumerate(graph.nodes)},
        list(kept),
        set(scaled),
    )


def descendants(graph: Graph, roots: Iterable[Node]) -> set[Node]:
    """``roots`` and all that depends on them (the output node aside)."""
    found = set(roots)
    for node in graph.nodes:
        if node.op != "output" and any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def ancestors(targets: Iterable[object]) -> set[Node]:
    """The nodes among ``targets`` and all they depend on."""
    stack = [node for node in targets if isinstance(node, Node)]
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def storage_of(node: Node) -> Node:
    """The node that owns the memory a view looks at."""
    while node.op == "call_function" and node.target in VIEWS:
        source = node.args[0]
        if not isinstance(source, Node):
            break
        node = source
    return node


def dtype_and_shape(node: object) -> tuple[Any, ...] | None:
    """Dtype and sizes of a node's tensor, which compare without a guard; ``None`` of all else."""
    value = value_of(node) if isinstance(node, Node) else None
    if isinstance(value, torch.Tensor):
        return (value.dtype, *(expr_of(size) for size in value.shape))
    return None


def bytes_of(node: Node) -> int:
    """Bytes of a node's value in the traced example (all results of a tuple)."""
    values = value_of(node)
    tensors = values if isinstance(values, (tuple, list)) else (values,)
    return sum(
        hint_of(product(value.shape)) * value.element_size()
        for value in tensors
        if isinstance(value, torch.Tensor)
    )

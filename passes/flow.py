"""Analysis: the calls of a training step's Dynamo graph, told apart.

Given:  h = embed(ids); mask = ...; h1 = layer(h, mask, W.half()); loss = head(h1, labels)
Result: embed, layer and head are calls, in order; masks and labels, and casts of weights, are the
        prologue, which can be computed wherever it is read
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import HigherOrderOperator

from .dynamo_calls import bodies_of, example_of, is_mode_switch
from .frontier import ops_of
from .mode_regions import Modes, is_switch, nodes_with_modes
from .placement import hint_of
from .rules.sizes import expr_of, product
from .writes import Writes

ATTENTION = torch.ops.streambp.attention.default
SCORES_DIMS = 4
"""``[batch, heads, tokens, tokens]``; hidden states have three."""


@dataclass
class Flow:
    """The calls of a Dynamo graph, told apart.

    calls
        Those that depend on a parameter, or whose place matters, in order.
    prologue
        The others: functions of ids, masks and labels alone, or of weights alone.
    trained
        What depends on a parameter.
    of_weights
        What depends on parameters alone, such as their casts, and the parameters themselves.
    placed
        Those that can not be run at another moment than the program runs them.
    lengths
        Sizes that may be the number of tokens.
    widths
        Sizes of weights.
    modes
        Those that each node runs in; what switches them is no call.
    """

    graph: Graph
    calls: list[Node]
    prologue: list[Node]
    trained: set[Node]
    of_weights: set[Node]
    placed: set[Node]
    lengths: set[Any]
    widths: set[Any]
    writes: Writes
    modes: dict[Node, Modes]
    order: dict[Node, int] = field(default_factory=dict)
    squares: dict[Node, bool] = field(default_factory=dict)

    def put_in_order(self, calls: list[Node]) -> None:
        """Let the calls be run in the order of ``calls``."""
        self.calls = calls
        self.order = {node: position for position, node in enumerate(calls)}

    def has_tokens(self, node: Node) -> bool:
        """Whether a value, if it is a tensor of several dims, has a row for each token."""
        value = example_of(node)
        if not isinstance(value, Tensor) or value.ndim < 2:
            return True
        merged = expr_of(product(value.shape[:-1]))
        return any(expr_of(size) in self.lengths for size in value.shape) or any(
            merged % length == 0 for length in self.lengths
        )

    def is_square(self, node: Node) -> bool:
        """Whether two dims of the value of ``node`` run over tokens, or almost."""
        if node not in self.squares:
            self.squares[node] = self._has_two_lengths(node) or self._is_nearly_square(node)
        return self.squares[node]

    def _is_nearly_square(self, node: Node) -> bool:
        """Whether a value is scores and some columns, as of attention sinks."""
        value = example_of(node)
        if node not in self.trained or not isinstance(value, Tensor) or value.ndim < SCORES_DIMS:
            return False
        for one in node.all_input_nodes:
            other = example_of(one)
            if one in self.trained and isinstance(other, Tensor) and self.is_square(one):
                if value.shape[:-1] == other.shape[:-1]:
                    few, more = hint_of(other.shape[-1]), hint_of(value.shape[-1])
                    if few <= more < 2 * few:
                        return True
        return False

    def _has_two_lengths(self, node: Node) -> bool:
        value = example_of(node)
        if not isinstance(value, Tensor):
            return False
        lengths = self.lengths
        if node in self.trained and value.ndim < SCORES_DIMS:
            lengths = lengths - self.widths  # as many tokens as a hidden state is wide
        return sum(expr_of(size) in lengths for size in value.shape) > 1

    def is_made_where_it_is_read(self, node: Node) -> bool:
        """Whether each segment that reads a value of the prologue computes it for itself.

        Of masks, it is proven there what they mask; weights and their casts are not kept.
        """
        return self.is_square(node) or node in self.of_weights

    def attends(self, node: Node) -> bool:
        """Whether tokens meet other tokens in a call: attention, or its scores."""
        if node.target is ATTENTION or _attends_within(node):
            return True
        return (
            node in self.trained
            and self.is_square(node)
            and not any(self.is_square(one) for one in node.all_input_nodes if one in self.trained)
        )


def read_flow(graph: Graph) -> Flow:
    """Tell the calls of a Dynamo graph apart."""
    writes = Writes(graph)
    inputs = graph.find_nodes(op="placeholder")
    trained = {node for node in inputs if is_trained(example_of(node))}
    weights = [node for node in inputs if isinstance(example_of(node), torch.nn.Parameter)]
    of_weights = set(weights)
    placed: set[Node] = set()
    prologue: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_switch(node):
            continue
        given = node.all_input_nodes
        if any(one in trained for one in given):
            trained.add(node)
        if _has_a_place(node, writes) or (
            node not in trained and any(one in placed for one in given)
        ):
            placed.add(node)
        elif node not in trained:
            prologue.append(node)
        elif all(one in of_weights for one in given):
            of_weights.add(node)
            prologue.append(node)
    calls = [
        node
        for node in graph.nodes
        if node in placed
        or (node.op.startswith("call") and node in trained and node not in of_weights)
    ]
    widths = {expr_of(size) for weight in weights for size in example_of(weight).shape}
    modes = dict(nodes_with_modes(graph))
    for node in prologue:
        if node not in trained:  # which has no gradient anyway
            modes[node] = replace(modes[node], gradients=True)
    lengths = _lengths(graph)
    flow = Flow(graph, calls, prologue, trained, of_weights, placed, lengths, widths, writes, modes)
    flow.put_in_order(calls)
    return flow


def is_trained(value: Any) -> bool:
    """Whether a value is a weight, frozen or not, or carries a gradient."""
    return isinstance(value, Tensor) and (
        isinstance(value, torch.nn.Parameter) or value.requires_grad
    )


def _has_a_place(node: Node, writes: Writes) -> bool:
    """Whether a call can not be run at another moment than the program runs it."""
    if not node.users or node.op == "call_module" or is_mode_switch(node):
        return True
    if isinstance(node.target, HigherOrderOperator):
        return True
    if any(writes.writers(value) for value in (node, *node.all_input_nodes)):
        return True
    if not isinstance(example_of(node), Tensor):
        return example_of(node) is None
    ops = ops_of(node)
    return ops is None or any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)


def _lengths(graph: Graph) -> set[Any]:
    """The sizes that the number of tokens may have."""
    found: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = example_of(node)
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            if value.ndim > 1 and "_dynamo_static_input_type" not in node.meta.get(
                "tensor_dict", {}
            ):
                found.update(expr_of(size) for size in value.shape[1:])
    for node in graph.find_nodes(op="call_function", target=ATTENTION):
        for operand in node.all_input_nodes[:2]:
            found.add(expr_of(example_of(operand).shape[2]))
    return {size for size in found if size != 1}


def _attends_within(node: Node) -> bool:
    """Whether a higher-order op has a body that attends."""
    if not isinstance(node.target, HigherOrderOperator):
        return False
    return any(
        inner.target is ATTENTION
        for body in bodies_of(node)
        for module in body.modules()
        if isinstance(module, GraphModule)
        for inner in module.graph.nodes
    )

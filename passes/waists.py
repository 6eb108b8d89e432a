"""Analysis: where a training step's Dynamo graph may be cut, and where few bytes would cross.

Given:  h0 = embed(ids) -> [norm, attention, +] -> [norm, mlp, +] = h1 -> [norm, attention, +] ...
Result: the places after h0, h1, ...; what is after the last of them is the head and the loss

Between two calls of attention the graph is cut once, at the latest of the narrowest places, so that
every layer of a model yields the same segment. After the last call it is cut where the layer before
was, if the last layer is made of the same calls, so that the head stands alone.

What depends on no parameter (positions, masks, labels) belongs to no place: `split_segments` gives
it to the segments that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import HigherOrderOperator, pytree, storage_id

from .autocast_regions import AutocastState, nodes_with_autocast
from .dynamo_calls import bodies_of, example_of, is_call, is_mode_switch
from .frontier import ops_of
from .placement import hint_of
from .rules.sizes import expr_of, product
from .writes import Writes, memory_of

ATTENTION = torch.ops.streambp.attention.default
SCORES_DIMS = 4
"""``[batch, heads, tokens, tokens]``; hidden states have three."""


@dataclass
class Flow:
    """The calls of a Dynamo graph, told apart.

    calls
        Those that depend on a parameter, or whose place matters, in order.
    prologue
        The others: functions of ids, masks and labels alone.
    trained
        Those of ``calls`` that depend on a parameter.
    lengths
        Sizes that may be the number of tokens.
    widths
        Sizes of weights.
    """

    graph: Graph
    calls: list[Node]
    prologue: list[Node]
    trained: set[Node]
    lengths: set[Any]
    widths: set[Any]
    writes: Writes
    order: dict[Node, int] = field(default_factory=dict)

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
        """Whether two dims of the value of ``node`` run over tokens."""
        value = example_of(node)
        if not isinstance(value, Tensor):
            return False
        lengths = self.lengths
        if node in self.trained and value.ndim < SCORES_DIMS:
            lengths = lengths - self.widths  # as many tokens as a hidden state is wide
        return sum(expr_of(size) in lengths for size in value.shape) > 1

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
    placed: set[Node] = set()
    prologue: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if any(one in trained for one in node.all_input_nodes):
            trained.add(node)
        elif _has_a_place(node, writes) or any(one in placed for one in node.all_input_nodes):
            placed.add(node)
        else:
            prologue.append(node)
    calls = [
        node
        for node in graph.nodes
        if (node.op.startswith("call") and node in trained) or node in placed
    ]
    calls = _without_empty_regions(calls)
    order = {node: position for position, node in enumerate(calls)}
    weights = [value for value in map(example_of, inputs) if isinstance(value, torch.nn.Parameter)]
    widths = {expr_of(size) for weight in weights for size in weight.shape}
    return Flow(graph, calls, prologue, trained, _lengths(graph), widths, writes, order)


def _without_empty_regions(calls: list[Node]) -> list[Node]:
    """``calls`` without entering and leaving autocast where only the prologue is within."""
    kept: list[Node] = []
    for node in calls:
        if kept and is_call(node, "_exit_autocast") and node.args == (kept[-1],):
            kept.pop()
        else:
            kept.append(node)
    return kept


def is_trained(value: Any) -> bool:
    """Whether a value is a weight, frozen or not, or carries a gradient."""
    return isinstance(value, Tensor) and (
        isinstance(value, torch.nn.Parameter) or value.requires_grad
    )


def _has_a_place(node: Node, writes: Writes) -> bool:
    """Whether a call can not be run at another moment than the program runs it."""
    if not node.users or node.op == "call_module" or is_mode_switch(node):
        return True
    if is_call(node, "_enter_autocast", "_exit_autocast"):
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


def find_waists(flow: Flow) -> list[int]:
    """The positions in ``flow.calls`` after which to cut, in order."""
    if any(is_call(node, "as_strided") for node in flow.graph.nodes):
        return []  # it reads memory, of which a segment's inputs need not be the whole
    crossings = list(_crossings(flow))
    # Of values that share memory, one is enough.
    weight = [(bytes_alive(nodes), len(nodes)) for nodes in crossings]
    may = [position for position, nodes in enumerate(crossings) if _may_cross(nodes, flow)]
    allowed = set(may) - _inside_regions(flow) - _within_written(flow)
    attention = [position for position, node in enumerate(flow.calls) if flow.attends(node)]
    chosen: list[int] = []
    for start, end in pairwise([0, *attention, len(flow.calls)]):
        last = end == len(flow.calls)
        position = _like_the_layer_before(flow, attention, chosen, allowed) if last else None
        if position is None:
            widest = _widest(flow, start, end) if last else end
            candidates = [one for one in range(start, widest) if one in allowed]
            fewest = min((weight[one] for one in candidates), default=(0, 0))
            position = max((one for one in candidates if weight[one] == fewest), default=None)
            if last and position is not None and widest < end:
                # Logits in bf16 are narrower than those in fp32 and no waist for that.
                if 2 * weight[position][0] >= bytes_alive([flow.calls[widest]]):
                    position = None
        if position is not None and position not in chosen:
            chosen.append(position)
    return chosen


def _crossings(flow: Flow) -> Iterator[list[Node]]:
    """For each position, the calls up to it whose results are read after it."""
    last = {
        node: max((flow.order.get(user, -1) for user in node.users), default=-1)
        for node in flow.calls
    }
    alive: dict[Node, None] = {}
    for position, node in enumerate(flow.calls):
        alive[node] = None
        alive = {one: None for one in alive if last[one] > position}
        yield list(alive)


def bytes_alive(nodes: Sequence[Node]) -> int:
    """Bytes of the values of ``nodes``, memory that they share once."""
    sizes: dict[int, int] = {}
    for node in nodes:
        for leaf in pytree.tree_leaves(example_of(node)):
            if isinstance(leaf, Tensor):
                size = hint_of(product(leaf.shape)) * leaf.element_size()
                key = storage_id(leaf)
                sizes[key] = max(sizes.get(key, 0), size)
    return sum(sizes.values())


def _may_cross(nodes: Sequence[Node], flow: Flow) -> bool:
    """Whether all of ``nodes`` may be handed from one segment to the next."""
    values = [example_of(node) for node in nodes]
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    if not all(isinstance(value, Tensor | torch.SymInt | int) for value in values):
        return False
    # Rows that a loss takes of the last hidden states do not tell how long the sequence is.
    return all(flow.has_tokens(node) and not flow.is_square(node) for node in nodes)


def _inside_regions(flow: Flow) -> set[int]:
    """Positions where autocast or the gradient mode is not what it is at the start."""
    autocast = dict(nodes_with_autocast(flow.graph, AutocastState()))
    inside: set[int] = set()
    gradients = True
    depth = 0
    for position, node in enumerate(flow.calls):
        if is_call(node, "_set_grad_enabled"):
            gradients = bool(node.args[0])
        elif is_call(node, "_enter_inference_mode"):
            depth += 1
        elif is_call(node, "_exit_inference_mode"):
            depth -= 1
        if not gradients or depth or autocast[node].entered:
            inside.add(position)
    return inside


def _within_written(flow: Flow) -> set[int]:
    """Positions between the first and the last call that touches memory written in place.

    Such memory belongs to one segment.
    """
    touched: dict[int, list[int]] = {}
    for position, node in enumerate(flow.calls):
        for value in (node, *node.all_input_nodes):
            if flow.writes.writers(value):
                for storage in memory_of(value):
                    touched.setdefault(storage, []).append(position)
    within: set[int] = set()
    for positions in touched.values():
        within.update(range(min(positions), max(positions)))
    return within


def _widest(flow: Flow, start: int, end: int) -> int:
    """The position of the widest value in ``[start, end)``: the logits, after the last layer."""
    candidates = [one for one in range(start, end) if not flow.is_square(flow.calls[one])]
    return max(candidates, key=lambda one: bytes_alive([flow.calls[one]]), default=end)


def _like_the_layer_before(
    flow: Flow, attention: list[int], chosen: list[int], allowed: set[int]
) -> int | None:
    """Where the last layer ends if it is made of the same calls as the one before."""
    if len(attention) < 2 or not chosen or chosen[-1] < attention[-2]:
        return None
    length = chosen[-1] - attention[-2]
    position = attention[-1] + length
    before = [node.target for node in flow.calls[attention[-2] : chosen[-1] + 1]]
    here = [node.target for node in flow.calls[attention[-1] : position + 1]]
    return position if before == here and position in allowed else None

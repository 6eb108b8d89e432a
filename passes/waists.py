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

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import HigherOrderOperator

from .delay_wide import delay_wide_values
from .dynamo_calls import bodies_of, example_of, is_call, is_derivative, is_mode_switch
from .frontier import ops_of
from .mode_regions import Modes, is_switch, nodes_with_modes
from .placement import hint_of
from .rules.sizes import expr_of, product
from .value_bytes import bytes_alive
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
    of_weights = {node for node in inputs if isinstance(example_of(node), torch.nn.Parameter)}
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
    weights = [value for value in map(example_of, inputs) if isinstance(value, torch.nn.Parameter)]
    widths = {expr_of(size) for weight in weights for size in weight.shape}
    modes = dict(nodes_with_modes(graph))
    for node in prologue:
        if node not in trained:  # which has no gradient anyway
            modes[node] = replace(modes[node], gradients=True)
    lengths = _lengths(graph)
    flow = Flow(graph, calls, prologue, trained, of_weights, placed, lengths, widths, writes, modes)
    flow.calls = delay_wide_values(flow)
    flow.order.update((node, position) for position, node in enumerate(flow.calls))
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


def find_waists(flow: Flow, notes: list[str]) -> list[int]:
    """The positions in ``flow.calls`` after which to cut, in order.

    ``notes`` are told where there is none between two calls of attention, and why.
    """
    why = _no_cut_at_all(flow)
    if why is not None:
        notes.append(f"not cut into segments: {why}")
        return []
    crossings = list(_crossings(flow))
    # Of values that share memory, one is enough.
    weight = [(bytes_alive(nodes), len(nodes)) for nodes in crossings]
    may = [position for position, nodes in enumerate(crossings) if _may_cross(nodes, flow)]
    inference = {at for at, node in enumerate(flow.calls) if flow.modes[node].inference}
    written = _within_written(flow)
    allowed = set(may) - inference - written
    attention = [position for position, node in enumerate(flow.calls) if flow.attends(node)]
    chosen: list[int] = []
    uncut: Counter[str] = Counter()
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
        elif position is None and not last:
            uncut[_why_not(range(start, end), inference, written)] += 1
    notes += [f"no cut between {count} pairs of layers: {why}" for why, count in uncut.items()]
    return chosen


def _no_cut_at_all(flow: Flow) -> str | None:
    if any(is_call(node, "as_strided") for node in flow.graph.nodes):
        # Of which a segment's inputs need not be the whole.
        return "the program reads memory by strides"
    if any(is_derivative(node) for node in _all_nodes(flow.graph)):
        # Segments are run on examples, and it allows no saved tensor hooks meanwhile.
        return "the program takes derivatives itself (torch.func)"
    return None


def _why_not(between: range, inference: set[int], written: set[int]) -> str:
    if inference.issuperset(between):
        return "they run in inference mode"
    if written.intersection(between):
        return "memory that is written in place is read on both sides"
    return "what would be handed on is no hidden state of every token"


def _all_nodes(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph, and of the bodies of its higher-order ops."""
    owner = graph.owning_module
    modules = owner.modules() if owner is not None else ()
    graphs = [module.graph for module in modules if isinstance(module, GraphModule)]
    for one in graphs or [graph]:
        yield from one.nodes


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


def _may_cross(nodes: Sequence[Node], flow: Flow) -> bool:
    """Whether all of ``nodes`` may be handed from one segment to the next."""
    values = [example_of(node) for node in nodes]
    if not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    if not all(isinstance(value, Tensor | torch.SymInt | int) for value in values):
        return False
    # Rows that a loss takes of the last hidden states do not tell how long the sequence is.
    return all(flow.has_tokens(node) and not flow.is_square(node) for node in nodes)


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

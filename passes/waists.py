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
from itertools import pairwise

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .dynamo_calls import example_of, is_call, is_derivative
from .flow import Flow
from .value_bytes import bytes_alive
from .writes import memory_of


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

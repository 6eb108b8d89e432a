"""Pass: choose the cuts, the forward values that are kept for backward.

A cut lies at a waist of the forward graph, where the bytes alive per token are fewest: the
residual stream between two transformer layers.

Given:  h0 -> [norm, attention, +] -> [norm, mlp, +] -> h1 -> [norm, attention, +] ... -> loss
Result: cuts {h0}, {h1}, ...; segment k is what lies between cut k-1 and cut k, the last one is
        the head and the loss

One attention call a segment: between two attention calls the latest of the narrowest places is
taken, so that every layer of a model yields the same segment. After the last call the cut is put
where the op sequence of the layer before it would put it, so that the last layer is like the
others and the head stands alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Node

from .axes import Axes
from .dataflow import JointGraph, ancestors, bytes_of, storage_of


@dataclass
class Segments:
    """The forward, cut.

    flow
        The forward's nodes that depend on activations, in order.
    cuts
        For each cut the values alive across it.
    segment
        The segment of each node of ``flow``.
    """

    flow: list[Node]
    cuts: list[set[Node]]
    segment: dict[Node, int]

    @property
    def count(self) -> int:
        """Number of segments, the head among them."""
        return len(self.cuts) + 1

    def cut_values(self) -> set[Node]:
        """Every value that some cut keeps."""
        return set().union(*self.cuts) if self.cuts else set()


def choose_cuts(joint: JointGraph, axes: Axes, *, is_segment: bool = False) -> Segments:
    """Cut the forward of ``joint`` at its waists; nowhere if it is a segment already."""
    required = ancestors([*joint.forward_outputs, *joint.kept])
    flow = [node for node in joint.graph.nodes if node in required and _in_flow(node, axes)]
    index = {node: position for position, node in enumerate(flow)}
    alive = _alive_values(flow, index, axes)
    attention = [position for position, node in enumerate(flow) if axes.attends(node)]
    positions = [] if is_segment else _waists(flow, alive, attention, axes)
    cuts = [alive[position] for position in positions]
    segment: dict[Node, int] = {}
    current = 0
    for position, node in enumerate(flow):
        while current < len(positions) and position > positions[current]:
            current += 1
        segment[node] = current
    return Segments(flow, cuts, segment)


def _in_flow(node: Node, axes: Axes) -> bool:
    """Whether the node is computed in a loop, or whole from what loops compute."""
    if node.op != "call_function":
        return False
    return axes.in_loop(node) or node in axes.after_loop


def _alive_values(flow: list[Node], index: dict[Node, int], axes: Axes) -> list[set[Node]]:
    """For each position of ``flow``, the values defined up to it and used after it."""
    last_use: dict[Node, int] = {}
    for position, node in enumerate(flow):
        for arg in node.all_input_nodes:
            owner = storage_of(arg)
            if owner in index:
                last_use[owner] = position
    alive: list[set[Node]] = []
    current: set[Node] = set()
    for position, node in enumerate(flow):
        if storage_of(node) is node and last_use.get(node, -1) > position:
            current = current | {node}
        expired = {value for value in current if last_use[value] <= position}
        current = current - expired
        alive.append(current)
    return alive


def _waists(
    flow: list[Node], alive: list[set[Node]], attention: list[int], axes: Axes
) -> list[int]:
    """The positions after which to cut."""
    weight = [sum(bytes_of(value) for value in values) for values in alive]
    borders = [0, *attention, len(flow)]
    chosen: list[int] = []
    for start, end in pairwise(borders):
        last = end == len(flow)
        if last:
            position = _like_the_layer_before(flow, alive, attention, chosen, axes)
            if position is None:
                widest = _widest(flow, start, end, axes)
                position = _narrowest(alive, weight, start, widest, axes)
                # Logits in bf16 are narrower than those in fp32 and no waist for that.
                if position is not None and 2 * weight[position] >= bytes_of(flow[widest]):
                    position = None
        else:
            position = _narrowest(alive, weight, start, end, axes)
        if position is not None and position not in chosen:
            chosen.append(position)
    return chosen


def _narrowest(
    alive: list[set[Node]], weight: list[int], start: int, end: int, axes: Axes
) -> int | None:
    """The latest narrowest position in ``[start, end)`` that has something alive."""
    candidates = [position for position in range(start, end) if _may_cut(alive[position], axes)]
    if not candidates:
        return None
    fewest = min(weight[position] for position in candidates)
    return max(position for position in candidates if weight[position] == fewest)


def _may_cut(values: set[Node], axes: Axes) -> bool:
    """Whether all of ``values`` may be kept: products of tokens with tokens are too large."""
    return bool(values) and all(
        value.op == "call_function" and value not in axes.columns for value in values
    )


def _widest(flow: list[Node], start: int, end: int, axes: Axes) -> int:
    """The position of the widest value in ``[start, end)``: the logits, after the last layer."""
    candidates = [position for position in range(start, end) if flow[position] not in axes.columns]
    return max(candidates, key=lambda position: bytes_of(flow[position]), default=end)


def _like_the_layer_before(
    flow: list[Node],
    alive: list[set[Node]],
    attention: list[int],
    chosen: list[int],
    axes: Axes,
) -> int | None:
    """Where the last layer ends if it is made of the same ops as the one before."""
    if len(attention) < 2 or not chosen or chosen[-1] < attention[-2]:
        return None
    length = chosen[-1] - attention[-2]
    position = attention[-1] + length
    before = [node.target for node in flow[attention[-2] : chosen[-1] + 1]]
    here = [node.target for node in flow[attention[-1] : position + 1]]
    if before == here and position < len(flow) and _may_cut(alive[position], axes):
        return position
    return None

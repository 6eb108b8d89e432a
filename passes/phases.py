"""Order the work of one segment into loops: which values a loop must finish before another starts.

Most ops need of their inputs the same chunk, and share one loop. An op that needs a *whole* input
(keys and values in backward, all tokens of an attention that is not causal, the finished sum of
another value) starts in the next phase. GLUE between loops belongs to the phase of the loop that
it follows.

Given:  k, v -> attention -> ... (backward: attention reads k and v of every earlier chunk)
Result: phase 0: loop over k, v      phase 1: loop over attention and all that follows
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from enum import Enum

import torch
from torch.fx import Node

from .axes import ATTENTION, ATTENTION_BACKWARD, Axes, Kind, attention_arguments


class Need(Enum):
    """What an op needs of an input to make its chunk."""

    LOCAL = "local"
    PAST = "past"
    WHOLE = "whole"


def needs(node: Node, axes: Axes, backward: bool) -> list[tuple[Node, Need]]:
    """Each input of ``node`` and what is needed of it.

    In an ascending forward loop the past of causal attention is there when a chunk is reached;
    a backward loop descends, so keys and values must be rebuilt before it.
    """
    if axes.kind[node] is Kind.GLUE:
        return [(arg, Need.WHOLE) for arg in node.all_input_nodes]
    if node.target not in (ATTENTION, ATTENTION_BACKWARD):
        step = axes.step.get(node)
        whole = step.whole if step is not None else ()
        return [(arg, Need.WHOLE if arg in whole else Need.LOCAL) for arg in node.all_input_nodes]
    arguments = attention_arguments(node)
    ascending = node.target is ATTENTION and arguments["causal"] is True and not backward
    kept = Need.PAST if ascending else Need.WHOLE
    keys = (arguments["key"], arguments["value"])
    return [(arg, kept if arg in keys else Need.LOCAL) for arg in node.all_input_nodes]


def finished_after_loop(node: Node, axes: Axes) -> bool:
    """Whether a value made in a loop is complete only when the loop has ended.

    Gradients of keys and values of causal attention are complete at each iteration of a
    descending loop: later chunks have added their share.
    """
    if axes.kind[node] is Kind.SUM:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or source.target is not ATTENTION_BACKWARD:
        return False
    if attention_arguments(source)["causal"] is True:
        return False
    return node.args[1] in (1, 2)


def assign_phases(
    nodes: list[Node], axes: Axes, backward: bool, dependent: Set[Node] = frozenset()
) -> dict[Node, int]:
    """The phase of each node of one segment or stage, given in topological order.

    ``dependent`` are the nodes that depend on a tangent: unlike the others, they are not computed
    again in a later loop that reads them.

    As late as possible: a value that waits for its reader would be kept for all tokens.
    """
    earliest = _earliest(nodes, axes, backward)
    last = max((earliest[node] for node in nodes if axes.in_loop(node)), default=-1)
    phase = _latest(nodes, axes, backward, dict.fromkeys(nodes, last))
    moved = _advance_sinks(nodes, axes, backward, dependent, earliest, phase)
    return _latest(nodes, axes, backward, moved)


def _latest(
    nodes: list[Node], axes: Axes, backward: bool, limit: Mapping[Node, int]
) -> dict[Node, int]:
    """The latest phase of each node, none beyond its ``limit``, in which its readers have it."""
    phase: dict[Node, int] = {}
    for node in reversed(nodes):
        current = limit[node]
        for user in node.users:
            if user not in phase:
                continue
            waits = axes.in_loop(user) and _waits(node, user, axes, backward)
            current = min(current, phase[user] - waits)
        phase[node] = current
    return phase


def _advance_sinks(
    nodes: list[Node],
    axes: Axes,
    backward: bool,
    dependent: Set[Node],
    earliest: dict[Node, int],
    latest: dict[Node, int],
) -> dict[Node, int]:
    """Move what no loop reads (weight gradients and what leads to them alone) to its inputs.

    Waiting for the last phase would keep its inputs for all tokens. Values that are computed again
    wherever they are read do not hold it back. A product of tokens with tokens is larger than its
    inputs, and waits for what reads it; what is made of such a product does not.
    """
    sinks: set[Node] = set()
    for node in reversed(nodes):
        readers = [user for user in node.users if user in latest and axes.in_loop(user)]
        if axes.in_loop(node) and all(user in sinks for user in readers):
            sinks.add(node)
    phase: dict[Node, int] = {}
    for node in nodes:
        phase[node] = latest[node]
        of_product = any(arg in axes.columns and arg in dependent for arg in node.all_input_nodes)
        if not of_product and (node not in sinks or node in axes.columns):
            continue
        kept = [
            phase[arg] + (1 if _waits(arg, node, axes, backward) else 0)
            for arg in node.all_input_nodes
            if arg in phase and axes.in_loop(arg) and arg in dependent
        ]
        if kept:
            phase[node] = min(latest[node], max(earliest[node], *kept))
    return phase


def _waits(node: Node, user: Node, axes: Axes, backward: bool) -> bool:
    """Whether a loop that computes ``user`` can start only when all of ``node`` exists."""
    if axes.kind[node] is Kind.GLUE or finished_after_loop(node, axes):
        return True
    return (node, Need.WHOLE) in needs(user, axes, backward)


def _earliest(nodes: list[Node], axes: Axes, backward: bool) -> dict[Node, int]:
    phase: dict[Node, int] = {}
    for node in nodes:
        glue = axes.kind[node] is Kind.GLUE
        current = -1 if glue else 0
        for arg, _ in needs(node, axes, backward):
            if arg in phase:
                wait = not glue and _waits(arg, node, axes, backward)
                current = max(current, phase[arg] + (1 if wait else 0))
        phase[node] = current
    return phase


def descends(nodes: list[Node]) -> bool:
    """Whether a loop over ``nodes`` must run from the last chunk to the first."""
    return any(node.target is ATTENTION_BACKWARD for node in nodes)


def is_tensor(node: Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)

"""In which modes the calls of a Dynamo graph run, and how to run others in the same ones.

Dynamo traces ``with torch.autocast(...)``, ``torch.no_grad()`` and ``torch.inference_mode()`` to
calls that switch modes on and off. A segment of a graph begins and ends in the modes in which the
graph is called, whatever region it lies in: it gets switches of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .autocast_regions import AutocastState, nodes_with_autocast
from .dynamo_calls import is_call


@dataclass(frozen=True)
class Modes:
    """What a program has switched on and off.

    gradients
        Whether gradients are recorded, as they are where the graph is called.
    inference
        How many inference modes are on, for which a segment gets no switch.
    """

    autocast: AutocastState = field(default_factory=AutocastState)
    gradients: bool = True
    inference: int = 0


def nodes_with_modes(graph: Graph) -> Iterator[tuple[Node, Modes]]:
    """Each node with the modes that it runs in."""
    gradients, inference = True, 0
    for node, autocast in nodes_with_autocast(graph, AutocastState()):
        if is_call(node, "_set_grad_enabled"):
            gradients = bool(node.args[0])
        inference += is_call(node, "_enter_inference_mode") - is_call(node, "_exit_inference_mode")
        yield node, Modes(autocast, gradients, inference)


def is_switch(node: Node) -> bool:
    """Whether a call is made again by `copied_in_modes`."""
    return is_call(node, "_enter_autocast", "_exit_autocast", "_set_grad_enabled")


def copied_in_modes(
    graph: Graph, nodes: Sequence[Node], modes: Mapping[Node, Modes], made: dict[Node, Node]
) -> Iterator[Node]:
    """Copies of ``nodes`` at the end of ``graph``, and the switches around them.

    Args:
        graph: where to copy to.
        nodes: in order, without switches.
        modes: those that each of them runs in; inference mode is none of ours.
        made: the copies of other nodes; the new ones are added.
    """
    entered: list[Node] = []
    state = Modes()
    for node in [*nodes, None]:
        here = Modes() if node is None else modes[node]
        if here.gradients != state.gradients:
            yield graph.call_function(torch._C._set_grad_enabled, (here.gradients,))
        if here.autocast != state.autocast:
            while entered:
                yield graph.call_function(torch.amp._exit_autocast, (entered.pop(),))
            for device, dtype in here.autocast.entered.items():
                arguments = (device, dtype, dtype is not None, None)
                entered.append(graph.call_function(torch.amp._enter_autocast, arguments))
                yield entered[-1]
        state = here
        if node is not None:
            made[node] = graph.node_copy(node, made.__getitem__)
            yield made[node]

"""Where autocast is on in a Dynamo graph, and for which dtype.

Dynamo traces ``with torch.autocast(...)`` inside the program to a pair of nodes,
``_enter_autocast`` and ``_exit_autocast``; autocast around the program is the state of the thread
that calls the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .dynamo_calls import argument_of, is_call


@dataclass(frozen=True)
class AutocastState:
    """Device type -> dtype, or ``None`` where it is switched off; others are as in the thread."""

    entered: dict[str, torch.dtype | None] = field(default_factory=dict)

    def dtype_for(self, device_type: str) -> torch.dtype | None:
        """The dtype ops are cast to on this device; ``None`` if they are not."""
        if device_type in self.entered:
            return self.entered[device_type]
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return None


def nodes_with_autocast(
    graph: Graph, around: AutocastState
) -> Iterator[tuple[Node, AutocastState]]:
    """Each node with the state it runs in; ``around`` is the state the graph is called in."""
    state = around
    outside: dict[Node, AutocastState] = {}
    for node in graph.nodes:
        if is_call(node, "_enter_autocast"):
            outside[node] = state
            device_type, dtype, enabled = (
                argument_of(node, position, name)
                for position, name in enumerate(("device_type", "dtype", "enabled"))
            )
            if dtype is None:
                dtype = torch.get_autocast_dtype(device_type)
            state = AutocastState({**state.entered, device_type: dtype if enabled else None})
        elif is_call(node, "_exit_autocast"):
            (entered,) = node.all_input_nodes
            state = outside[entered]
        yield node, state

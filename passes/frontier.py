"""From which few bytes can an output be computed again?

Glossary
--------
inside
    The nodes that are run again: the output and what lies between it and the frontier.
frontier
    The activations that the inside reads. Graph inputs are read too but cost nothing: the caller
    holds the parameters and the token ids anyway.

The walk starts at the output and takes the latest node of the frontier inside, as long as that
node can be run again (no random numbers, nothing changed in place, in the output's autocast
region) and at most `LONGEST_CHAIN` matrix products follow one another inside. For logits it passes
scale, softcap and casts, the head's product (beside it, with a low-rank adapter, a chain of two),
and then the final norm, where bytes no longer fall. Without the limit it would end at the token
ids, 0 bytes, with the whole model inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import (
    HigherOrderOperator,
    TorchDispatchMode,
    enable_python_dispatcher,
    pytree,
)

from .autocast_regions import AutocastState
from .dynamo_calls import example_of
from .placement import hint_of
from .rules.sizes import product
from .writes import Writes, writes_in_place

aten = torch.ops.aten
INPUTS = ("placeholder", "get_attr")
LONGEST_CHAIN = 2
_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
    }
)


def byte_hint(value: Any) -> int:
    """The bytes of the tensors in ``value`` at the traced sizes; adds no guard."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(hint_of(product(tensor.shape)) * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Frontier:
    """A set of activations from which ``output`` can be computed.

    nodes, inputs and inside are in graph order; nodes are tensor- or integer-valued.
    """

    output: Node
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    inside: tuple[Node, ...]

    def bytes(self, kept: Mapping[Node, Any]) -> int:
        """What holding it costs when the nodes of ``kept`` are held already."""
        return sum(byte_hint(example_of(node)) for node in self.nodes if node not in kept)


def itself(output: Node) -> Frontier:
    """The frontier that is the output."""
    return Frontier(output, (output,), (), ())


def cheapest_frontier(
    output: Node,
    order: Mapping[Node, int],
    autocast: Mapping[Node, AutocastState],
    writes: Writes,
) -> Frontier | None:
    """The frontier of ``output`` with the fewest bytes, or ``None`` if none has fewer than it.

    ``order`` and ``autocast`` have the position and the autocast region of each node, ``writes``
    what the graph changes in place.
    """
    best: Frontier | None = None
    best_bytes = byte_hint(example_of(output))
    inside: list[Node] = []
    frontier = {output}
    inputs: set[Node] = set()
    chain = {output: 0}  # the most products on a way from a node, itself left out, to the output
    while frontier:
        latest = max(frontier, key=order.__getitem__)
        ops = ops_of(latest)
        if (
            ops is None
            or autocast[latest] != autocast[output]
            or not _repeatable(latest, ops, writes)
        ):
            break
        # A walk that ended at the token ids in the first layer would treat that layer's K/V cache
        # unlike the other layers'.
        length = chain[latest] + is_product(ops)
        if length > LONGEST_CHAIN or aten.embedding.default in ops:
            break
        frontier.remove(latest)
        inside.append(latest)
        for node in latest.all_input_nodes:
            (inputs if node.op in INPUTS else frontier).add(node)
            chain[node] = max(length, chain.get(node, 0))
        values = [example_of(node) for node in frontier]
        if not all(isinstance(value, Tensor | torch.SymInt | int) for value in values):
            continue
        size = sum(byte_hint(value) for value in values)
        if size < best_bytes:
            best_bytes = size
            best = Frontier(
                output,
                tuple(sorted(frontier, key=order.__getitem__)),
                tuple(sorted(inputs, key=order.__getitem__)),
                tuple(reversed(inside)),
            )
    return best


class _Record(TorchDispatchMode):
    """Remembers the ops that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # questions such as prim.device compute nothing
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def ops_of(node: Node) -> list[Any] | None:
    """The op overloads that a node runs, found by running it on its fake arguments; ``None`` for
    a node that is not a plain call on known values."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, HigherOrderOperator):
        return None
    values = [example_of(input_node) for input_node in node.all_input_nodes]
    fakes = [value for value in (example_of(node), *values) if hasattr(value, "fake_mode")]
    if example_of(node) is None or not fakes or any(value is None for value in values):
        return None
    fake_mode = fakes[0].fake_mode
    with fake_mode:
        # An op that works in place would change the examples themselves.
        given = _stand_in if writes_in_place(node) else example_of
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given)
    with torch.no_grad(), fake_mode, enable_python_dispatcher(), _Record() as record:
        if isinstance(node.target, str):
            getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            node.target(*args, **kwargs)
    return record.ops


def _stand_in(node: Node) -> Any:
    """A value of its own like the example of ``node``."""
    value = example_of(node)
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=value.device
    ).requires_grad_(value.requires_grad)


def is_product(ops: list[Any]) -> bool:
    """Whether a node that runs ``ops`` costs what a matrix product costs, or may do so."""
    return any(
        op in _PRODUCTS or op.namespace not in ("aten", "prims") or "attention" in str(op)
        for op in ops
    )


def _repeatable(node: Node, ops: list[Any], writes: Writes) -> bool:
    """Whether running the node again, later, gives the same result."""
    if any(writes.writers(value) for value in (node, *node.all_input_nodes)):
        return False
    return not any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)


def extract(frontier: Frontier, owner: GraphModule) -> GraphModule:
    """A module that maps ``(*frontier.nodes, *frontier.inputs)`` to the output."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in (*frontier.nodes, *frontier.inputs):
        copies[node] = (
            graph.node_copy(node) if node.op == "get_attr" else graph.placeholder(node.name)
        )
    for node in frontier.inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output(copies[frontier.output])
    return GraphModule(owner, graph, class_name="DeferredOutput")

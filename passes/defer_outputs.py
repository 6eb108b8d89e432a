"""Take the large outputs that the loss does not need out of a Dynamo graph.

Given a training step's graph::

    hidden = norm(...)                      # [B, T, d]
    logits = linear(hidden, head_weight)    # [B, T, V]
    loss = cross_entropy(logits.float(), labels)
    return keys, values, loss, logits

Result::

    hidden = norm(...)
    logits = linear(hidden, head_weight)
    loss = cross_entropy(logits.float(), labels)
    return loss, hidden.detach()

and a `Deferral`, whose ``rebuild`` puts a `DeferredTensor` where ``logits`` was (computed from
``hidden`` and ``head_weight`` when it is first used), and ones that say how to keep them where
``keys`` and ``values`` were. No output but the loss has a tangent then, so the logits can be
streamed, and nothing of the size of the logits or of a K/V cache lives through the step.

Out of scope: graphs without a loss (inference wants its outputs) and integer outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import storage_id
from streambp_fx.deferred import DeferredTensor, deferred_tensor
from streambp_fx.deferred_values import Recipe

from .autocast_regions import AutocastState, nodes_with_autocast
from .dynamo_calls import example_of
from .frontier import (
    Frontier,
    byte_hint,
    cheapest_frontier,
    extract,
    itself,
)
from .placement import hint_of
from .rowwise import is_rowwise
from .rules.sizes import expr_of, product
from .rules.spec import Size
from .writes import Writes

SizeOf = Callable[[Sequence[Any]], int]
"""A size as a function of the graph's inputs."""

SMALL_PER_TOKEN = 64
"""A matrix output with at most this many elements per token (of the largest integer input) stays:
it costs less than one layer's saved input."""

HIDDEN_STATE_DIMS = 3
"""``[batch, tokens, width]``; a cache has a dim more, for its heads."""

WORTH = 4
"""An output earlier than the last is computed from its frontier only where that holds this factor
fewer bytes. Else the K/V cache of every layer would hold that layer's hidden state."""


@dataclass(frozen=True)
class DeferredOutput:
    """A plan for one output that was taken out of the graph.

    recipe
        How it is computed, or that it can not be.
    frontier, inputs
        Positions of the recipe's operands: first among the new graph's outputs, then among the
        graph's inputs.
    saved
        Bytes of the output at the traced sizes.
    held
        Bytes of its frontier.
    """

    recipe: Recipe
    frontier: tuple[int, ...]
    inputs: tuple[int, ...]
    size: tuple[SizeOf, ...]
    stride: tuple[SizeOf, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    saved: int
    held: int

    def stand_in(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> DeferredTensor:
        """The tensor that takes the output's place for one call of the graph."""
        operands = [outputs[position] for position in self.frontier]
        operands += [inputs[position] for position in self.inputs]
        return deferred_tensor(
            self.recipe,
            operands,
            size=[size(inputs) for size in self.size],
            stride=[stride(inputs) for stride in self.stride],
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )


@dataclass(frozen=True)
class Deferral:
    """A graph with fewer outputs, and the way back to the original ones.

    Each of ``slots`` is one original output: a position among the new outputs, or a plan.
    """

    graph: GraphModule
    slots: tuple[int | DeferredOutput, ...]

    @property
    def deferred(self) -> tuple[DeferredOutput, ...]:
        """The plans, each once."""
        plans = [slot for slot in self.slots if isinstance(slot, DeferredOutput)]
        return tuple({id(plan): plan for plan in plans}.values())

    def rebuild(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The original flat outputs, from one call's new outputs and the graph's inputs."""
        stand_ins = {id(plan): plan.stand_in(outputs, inputs) for plan in self.deferred}
        return tuple(
            outputs[slot] if isinstance(slot, int) else stand_ins[id(slot)] for slot in self.slots
        )


def defer_outputs(
    gm: GraphModule, example_inputs: Sequence[Any], *, keep_outputs: bool
) -> Deferral:
    """Take the large outputs out of a Dynamo graph that returns a loss, changing ``gm`` in place.

    Args:
        gm: a graph as Dynamo hands it to a backend: fake values in ``meta["example_value"]``.
        example_inputs: the backend's second argument.
        keep_outputs: change nothing; every output is computed with the step.
    """
    flat: list[Any] = list(cast("Sequence[Any]", gm.graph.output_node().args[0]))
    unchanged = Deferral(gm, tuple(range(len(flat))))
    if keep_outputs or len(example_inputs) == 0:
        return unchanged
    outputs = [node for node in dict.fromkeys(flat) if isinstance(node, Node)]
    if not _has_loss(outputs):
        return unchanged
    frontiers = _choose(gm.graph, outputs)
    if not frontiers:
        return unchanged
    return _exchange(gm, flat, frontiers)


def _has_loss(outputs: Sequence[Node]) -> bool:
    """Whether there is a floating scalar among the outputs, with a gradient if any has one."""
    values = [example_of(node) for node in outputs]
    tensors = [value for value in values if isinstance(value, Tensor)]
    gradient = any(tensor.requires_grad for tensor in tensors)
    return any(_is_scalar(tensor) and tensor.requires_grad == gradient for tensor in tensors)


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and all(expr_of(size) == 1 for size in tensor.shape)


def _choose(graph: Graph, outputs: Sequence[Node]) -> dict[Node, Frontier | None]:
    """The outputs to defer, each with the frontier it is computed from, if there is one."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    symbols = _symbol_positions(placeholders)
    tokens = max(
        (
            hint_of(product(value.shape))
            for value in map(example_of, placeholders)
            if isinstance(value, Tensor) and not value.is_floating_point()
        ),
        default=0,
    )
    large = [
        node for node in outputs if _is_large(node, tokens) and _sizes_known(node, set(symbols))
    ]
    order = {node: index for index, node in enumerate(graph.nodes)}
    autocast = dict(nodes_with_autocast(graph, AutocastState()))
    writes = Writes(graph)
    chosen: dict[Node, Frontier | None] = {}
    kept: dict[Node, None] = {}
    for node in sorted(large, key=order.__getitem__, reverse=True):
        frontier = cheapest_frontier(node, order, autocast, writes)
        if not chosen or node in kept:
            # One tensor at most the size of a hidden state may stay: a model with few classes.
            frontier = frontier or itself(node)
        elif example_of(node).ndim == HIDDEN_STATE_DIMS:
            # Layers' inputs are saved for backward anyway; and they are returned on request alone.
            frontier = itself(node)
        elif frontier and frontier.bytes(kept) * WORTH > byte_hint(example_of(node)):
            frontier = None
        chosen[node] = frontier
        kept.update(dict.fromkeys(frontier.nodes if frontier else ()))
    return chosen


def _is_large(node: Node, tokens: int) -> bool:
    """Whether an output grows with the sequence by more than a few numbers per token."""
    value = example_of(node)
    if node.op == "placeholder" or not isinstance(value, Tensor) or _is_scalar(value):
        return False
    if not value.is_floating_point() or _is_view_of_input(node):
        return False
    if value.ndim == 2:
        return 0 < tokens * SMALL_PER_TOKEN < hint_of(product(value.shape))
    return value.ndim > 2


def _is_view_of_input(node: Node) -> bool:
    storage = storage_id(example_of(node))
    inputs = map(example_of, node.graph.find_nodes(op="placeholder"))
    return any(isinstance(value, Tensor) and storage_id(value) == storage for value in inputs)


def _symbol_positions(placeholders: Sequence[Node]) -> dict[sympy.Symbol, int]:
    """Which graph input is the value of each symbol."""
    positions = {}
    for index, node in enumerate(placeholders):
        value = example_of(node)
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            positions[value.node.expr] = index
    return positions


def _sizes_known(node: Node, symbols: set[sympy.Symbol]) -> bool:
    value = example_of(node)
    sizes = (*value.shape, *value.stride())
    return all(expr_of(size).free_symbols <= symbols for size in sizes)


def _size_of(size: Size, positions: dict[sympy.Symbol, int]) -> SizeOf:
    expr = expr_of(size)
    if expr.is_number:
        constant = int(expr)
        return lambda inputs: constant
    used = {symbol: positions[symbol] for symbol in expr.free_symbols}
    return lambda inputs: int(
        expr.xreplace({symbol: sympy.Integer(inputs[index]) for symbol, index in used.items()})
    )


def _exchange(
    gm: GraphModule, flat: Sequence[Any], frontiers: dict[Node, Frontier | None]
) -> Deferral:
    """Replace the outputs in ``frontiers`` by the nodes that they are computed from."""
    output = gm.graph.output_node()
    new_outputs: list[Any] = []
    slots: list[int | DeferredOutput | None] = []
    for value in flat:
        is_deferred = isinstance(value, Node) and value in frontiers
        slots.append(None if is_deferred else len(new_outputs))
        if not is_deferred:
            new_outputs.append(value)

    positions: dict[Node, int] = {}
    for frontier in frontiers.values():
        for node in frontier.nodes if frontier else ():
            if node not in positions:
                positions[node] = len(new_outputs)
                new_outputs.append(_detached(node, output))

    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    index_of = {node: index for index, node in enumerate(placeholders)}
    symbols = _symbol_positions(placeholders)
    autocast = dict(nodes_with_autocast(gm.graph, AutocastState()))
    plans: dict[Node, DeferredOutput] = {}
    for node, frontier in frontiers.items():
        value = example_of(node)
        plans[node] = DeferredOutput(
            recipe=Recipe(
                node.name,
                extract(frontier, gm) if frontier else None,
                rowwise=frontier is not None and is_rowwise(frontier),
                autocast=autocast[node].entered,
            ),
            frontier=tuple(positions[n] for n in frontier.nodes) if frontier else (),
            inputs=tuple(index_of[n] for n in frontier.inputs if n in index_of) if frontier else (),
            size=tuple(_size_of(size, symbols) for size in value.shape),
            stride=tuple(_size_of(stride, symbols) for stride in value.stride()),
            dtype=value.dtype,
            device=value.device,
            requires_grad=value.requires_grad,
            saved=byte_hint(value),
            held=frontier.bytes({}) if frontier else 0,
        )
    output.args = (tuple(new_outputs),)
    gm.graph.lint()
    gm.recompile()
    return Deferral(
        gm,
        tuple(
            plans[value] if slot is None else slot for value, slot in zip(flat, slots, strict=True)
        ),
    )


def _detached(node: Node, output: Node) -> Node:
    """The node as an output without a tangent."""
    value = example_of(node)
    if not isinstance(value, Tensor):
        return node
    with node.graph.inserting_before(output):
        detached: Node = node.graph.call_method("detach", (node,))
    detached.meta["example_value"] = value.detach()
    return detached

"""The terms of the memory model, and which of them each value of a rewritten graph belongs to.

layer inputs          the cuts: what each layer needs to compute itself again (``H_in``)
residual gradient     the gradient that enters and leaves a stage
keys and values       of one layer, over the whole sequence
their gradients       in the accumulation dtype
parameter gradients   those returned, and the sums that become them
chunk                 what one call of a loop's body allocates; that of the head by itself
copies of weights     casts and transposes that are made just before their loop
prologue              masks, positions and labels that are made once
unstreamed            what is computed on the whole sequence
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Set
from enum import StrEnum
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..passes.body import BodyCall, BodyPlan, LoopBody, Ref
from ..passes.dataflow import is_tangent
from ..passes.loops import StreamLoop
from ..passes.lower import CompiledBody

streambp = torch.ops.streambp


class Term(StrEnum):
    """What a buffer is for."""

    LAYER_INPUTS = "layer inputs"
    RESIDUAL_GRADIENT = "residual gradient"
    KEYS_VALUES = "keys and values"
    KEY_VALUE_GRADIENTS = "gradients of keys and values"
    PARAMETER_GRADIENTS = "parameter gradients"
    CHUNK = "one chunk of a layer"
    HEAD = "one chunk of the head"
    WEIGHTS = "copies of weights"
    PROLOGUE = "prologue"
    UNSTREAMED = "unstreamed values"


# For each op of bodies, the arguments that are buffers of the whole sequence.
_BUFFERS = {
    streambp.write_chunk_.default: {0: Term.KEYS_VALUES},
    streambp.attention_chunk.default: dict.fromkeys((1, 2), Term.KEYS_VALUES),
    streambp.attention_chunk_backward.default: {
        **dict.fromkeys((2, 3), Term.KEYS_VALUES),
        **dict.fromkeys((8, 9), Term.KEY_VALUE_GRADIENTS),
    },
}
# What a value between loops inherits from those that it is computed from, the first that fits.
_INHERITED = (
    (Term.PARAMETER_GRADIENTS, Term.PARAMETER_GRADIENTS),
    (Term.RESIDUAL_GRADIENT, Term.RESIDUAL_GRADIENT),
    (Term.LAYER_INPUTS, Term.UNSTREAMED),
    (Term.UNSTREAMED, Term.UNSTREAMED),
)


def label_halves(
    forward: GraphModule, backward: GraphModule | None, parameters: Set[str]
) -> tuple[dict[Node, Term], dict[Node, Term]]:
    """`label` of a forward graph and of its backward, if it has one.

    What forward saved has its term in backward; it goes by its name.
    """
    terms = label(forward, False, {}, parameters)
    if backward is None:
        return terms, {}
    returned: Any = forward.graph.output_node().args[0]
    known = {node.name: terms[node] for node in returned if node in terms}
    return terms, label(backward, True, known, parameters)


def label(
    graph_module: GraphModule, backward: bool, known: Mapping[str, Term], parameters: Set[str]
) -> dict[Node, Term]:
    """The term of each value that the graph makes; of a loop, its getitems have them.

    Args:
        graph_module: a forward or backward graph with loops.
        backward: which of the two it is.
        known: terms of placeholders, by name: those that forward saved.
        parameters: the names of placeholders that are parameters.
    """
    found: dict[Node, Term] = {}
    weights: set[Node] = set()
    for node in graph_module.graph.nodes:
        if isinstance(node.target, StreamLoop):
            for index, term in operand_terms(body_of(node).plan).items():
                operand = node.args[2 + index]
                if isinstance(operand, Node):
                    found[operand] = term
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.name in known:
                found[node] = known[node.name]
            elif is_tangent(node):
                found[node] = Term.UNSTREAMED  # so is what glue makes of it alone
            if node.name in parameters:
                weights.add(node)
        elif node.op == "call_function" and node not in found:
            if node.target is operator.getitem and isinstance(node.args[0].target, StreamLoop):
                found[node] = _of_result(node, backward, found)
            else:
                found[node] = _of_glue(node, found, weights)
    for node in reversed(graph_module.graph.nodes):
        if found.get(node) is Term.PROLOGUE and not node.all_input_nodes:
            found[node] = _first({found.get(user) for user in node.users})
    return found


def _of_result(node: Node, backward: bool, found: Mapping[Node, Term]) -> Term:
    """The term of a loop's result: of the sum that it is, or by who reads it."""
    loop, index = node.args
    spec = loop.meta["loop"]  # type: ignore[union-attr]
    result = spec.results[index]
    if result.buffer is not None:
        return operand_terms(body_of(loop).plan)[result.buffer]  # type: ignore[arg-type]
    if found.get(node) is Term.KEYS_VALUES:
        return Term.KEYS_VALUES
    sums = any(result.buffer is not None for result in spec.results)
    # A forward loop that sums parameter gradients is the head's, with its backward in it.
    return Term.RESIDUAL_GRADIENT if backward or (spec.head and sums) else Term.LAYER_INPUTS


def _of_glue(node: Node, found: Mapping[Node, Term], weights: set[Node]) -> Term:
    inputs = node.all_input_nodes
    if inputs and all(arg in weights for arg in inputs):
        weights.add(node)
        return Term.WEIGHTS
    return _first({found.get(arg) for arg in inputs})


def _first(terms: Set[Term | None]) -> Term:
    """The term that a value has by those of the values around it."""
    return next((term for cause, term in _INHERITED if cause in terms), Term.PROLOGUE)


def operand_terms(plan: BodyPlan) -> dict[int, Term]:
    """For the operands of a loop that are keys, values or sums: their term."""
    terms = {
        index: Term.PARAMETER_GRADIENTS
        for index, operand in enumerate(plan.operands)
        if operand.mutated
    }
    terms.update((index, term) for _, index, term in buffers(plan))
    return terms


def buffers(plan: BodyPlan) -> Iterator[tuple[BodyCall, int, Term]]:
    """The calls that read or write buffers of the whole sequence: call, operand and its term."""
    for call in plan.calls:
        for position, term in _BUFFERS.get(call.target, {}).items():
            argument = call.args[position]
            if isinstance(argument, Ref) and argument.kind == "operand":
                yield call, argument.index, term


def body_of(loop: Node) -> LoopBody:
    """The body of a loop node.

    Raises:
        TypeError: the loop has another kind of body.
    """
    body = getattr(loop.graph.owning_module, str(loop.args[0].target))  # type: ignore[union-attr]
    if isinstance(body, CompiledBody):
        body = body.body
    if not isinstance(body, LoopBody):
        raise TypeError(f"the body of {loop} is a {type(body).__name__}")
    return body

"""The loops of a rewritten graph as a reader wants them: operands, order and why it is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..passes.body import LoopBody
from ..passes.loops import chunk_count
from ..passes.lower import loop_nodes
from ..passes.pipeline import History
from ..passes.placement import last_line
from .names import Names, readable_names
from .terms import Term, body_of, buffers, operand_terms

streambp = torch.ops.streambp


@dataclass(frozen=True)
class Operand:
    """What a loop is given, by the name that the program has for it where there is one.

    ``how`` is ``"whole"``, ``"chunk"`` (of dim ``dim``), ``"past"`` (a buffer of the whole sequence
    of which an iteration reads or writes what lies before its last token), ``"sum"`` (added to in
    place) or ``"size"``.
    """

    name: str
    how: str
    dim: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Region:
    """One loop.

    layer
        The number of the segment that it belongs to, counted from the model's input.
    body
        The name of its body; loops with the same one share compiled code.
    chunks
        How often the body runs in the traced example.
    order, reason
        Ascending or descending, and why the result is that of the whole.
    sources
        The user's lines that its ops come from.
    """

    name: str
    layer: int
    backward: bool
    head: bool
    body: str
    calls: int
    chunk_size: int
    chunks: int
    order: str
    reason: str
    operands: tuple[Operand, ...]
    results: tuple[str, ...]
    sources: tuple[str, ...]


# Where calls of attention say whether a chunk reads the past alone.
_CAUSAL = {
    streambp.attention_chunk.default: 6,
    streambp.attention_chunk_backward.default: 11,
}


def regions(history: History) -> list[Region]:
    """The loops of a graph's forward and backward, in the order in which they run."""
    found: list[Region] = []
    bodies: dict[object, str] = {}
    names = readable_names(history)
    for name in ("forward", "backward"):
        graph_module = history.graphs.get(name)
        if graph_module is not None:
            found += _regions_of(graph_module, name == "backward", bodies, names[name])
    return found


def _regions_of(
    graph_module: GraphModule, backward: bool, bodies: dict[object, str], names: Names
) -> Iterator[Region]:
    for loop in loop_nodes(graph_module):
        body, spec = body_of(loop), loop.meta["loop"]
        length = _int(loop.args[1])
        yield Region(
            spec.name,
            spec.place.segment,
            backward,
            spec.head,
            bodies.setdefault(body.key, spec.name),
            len(body.plan.calls),
            spec.chunk_size,
            chunk_count(length, spec.chunk_size),
            "descending" if spec.descending else "ascending",
            _reason(body, spec.descending),
            tuple(_operands(loop, body, names)),
            tuple(_results(loop, names)),
            tuple(dict.fromkeys(map(last_line, loop.meta["stack_traces"]))),
        )


def _int(value: object) -> int:
    if isinstance(value, Node):
        value = value.meta["val"]
    return int(value)  # type: ignore[call-overload]


def _operands(loop: Node, body: LoopBody, names: Names) -> Iterator[Operand]:
    terms = operand_terms(body.plan)
    sums = _sums(loop, names)
    past = _past_operands(body)
    for index, (operand, node) in enumerate(zip(body.plan.operands, loop.args[2:], strict=True)):
        if not isinstance(node, Node):
            yield Operand(str(node), "size", None, (), None)
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            yield Operand(names.with_line(node), "size", None, (), None)
            continue
        if operand.along is not None:
            how = "chunk"
        elif index in past:
            how = "past"
        else:
            how = "sum" if terms.get(index) is Term.PARAMETER_GRADIENTS else "whole"
        dim = None if operand.along is None else operand.along.dim
        name = sums.get(index) or names.with_line(node)
        if node.op == "call_function" and not node.all_input_nodes:  # a new buffer
            if how == "past":
                name = str(terms[index])
            elif how == "sum" and index not in sums:
                name = "a new sum"
        yield Operand(name, how, dim, tuple(map(int, value.shape)), value.dtype)


def _past_operands(body: LoopBody) -> set[int]:
    """Keys, values and their gradients, of which a causal chunk touches what is before its end."""
    return {
        index
        for call, index, _ in buffers(body.plan)
        if call.target not in _CAUSAL or call.args[_CAUSAL[call.target]] is True
    }


def _sums(loop: Node, names: Names) -> dict[int, str]:
    """Names for the operands that results are summed in."""
    results = loop.meta["loop"].results
    return {
        results[index].buffer: f"gradient of {name}"
        for index, name in _gradients(loop, names).items()
        if results[index].buffer is not None
    }


def _gradients(loop: Node, names: Names) -> dict[int, str]:
    """For results that are gradients of inputs: of which."""
    taken = ((node.args[1], names.gradients.get(node.name)) for node in loop.users)
    return {index: name for index, name in taken if name is not None}  # type: ignore[misc]


def _results(loop: Node, names: Names) -> Iterator[str]:
    gradients = _gradients(loop, names)
    specs = loop.meta["loop"].results
    for index, (result, value) in enumerate(zip(specs, loop.meta["val"], strict=True)):
        shape = "x".join(str(int(size)) for size in value.shape) or "scalar"
        of = f", gradient of {gradients[index]}" if index in gradients else ""
        if result.buffer is not None:
            yield f"sum {shape}{of}"
        else:
            yield f"concatenated along dim {result.along.dim}: {shape}{of}"


def _reason(body: LoopBody, descending: bool) -> str:
    targets = {call.target for call in body.plan.calls}
    sums = any(result.buffer is not None for result in body.plan.results)
    if streambp.attention_chunk_backward.default in targets and descending:
        return (
            "every later chunk has added its share to a chunk's gradients of keys and values "
            "before that chunk is reached"
        )
    if streambp.write_chunk_.default in targets:
        return "a chunk's keys and values are written before it or a later chunk reads them"
    reason = "no chunk reads what another one makes, so that any order is right"
    return f"{reason}; sums are over chunks" if sums else reason

"""Predict the memory of a training step from its rewritten graphs, without running it.

The graphs are walked node by node on fake tensors, as the backend runs them: a value is dropped
after its last use, a loop holds the results that it concatenates, and what one call of its body
allocates comes and goes with each chunk. Bytes are counted above those at the step's start, with
the parameters' gradients allocated, which is how a step is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from streambp_fx._torch import FakeTensorMode, pytree, storage_id

from ..passes.body import LoopBody
from ..passes.dataflow import is_tangent
from ..passes.loops import StreamLoop, chunk_bounds, chunk_inputs, chunk_ranges
from ..passes.pipeline import History
from ..passes.placement import hint_of
from .terms import Term, body_of, label

Workspace = Callable[[LoopBody, Sequence[Any]], int]
"""``workspace(body, inputs)``: the most bytes that one call of a body allocates, results too."""


@dataclass(frozen=True)
class Buffer:
    """One allocation: the node that made it, its term, and bytes."""

    name: str
    term: Term
    nbytes: int


@dataclass(frozen=True)
class Moment:
    """The buffers that are alive while ``node`` runs, a loop by its own name."""

    node: str
    backward: bool
    buffers: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        """All bytes that are alive."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def terms(self) -> dict[Term, int]:
        """Bytes by term, those that have any."""
        total: Counter[Term] = Counter()
        for buffer in self.buffers:
            total[buffer.term] += buffer.nbytes
        return {term: total[term] for term in Term if total[term]}


@dataclass
class StepMemory:
    """The moments of one step, in the order of time."""

    moments: list[Moment] = field(default_factory=list)

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.nbytes)


def predict(history: History, workspace: Workspace) -> StepMemory:
    """The memory of one step of a graph: its forward, and its backward if it has one.

    Outputs other than what backward needs are dropped when forward has returned, as by
    ``model(...).loss.backward()``.
    """
    forward, backward = history.graphs["forward"], history.graphs.get("backward")
    memory = StepMemory()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        walk = _Walk(memory, workspace)
        terms = label(forward, False, {}, history.parameters)
        inputs = [_fake(node) for node in forward.graph.find_nodes(op="placeholder")]
        walk.ignore(inputs)
        results = walk.run(forward, inputs, False, terms)
        if backward is None:
            return memory
        placeholders = backward.graph.find_nodes(op="placeholder")
        # What is saved goes by its name: sizes come last in one graph, and first in the other.
        returned: Any = forward.graph.output_node().args[0]
        made = {node.name: (node, value) for node, value in zip(returned, results, strict=True)}
        saved = {node: made[node.name] for node in placeholders if not is_tangent(node)}
        walk.keep([value for _, value in saved.values()])
        known = {node.name: terms[source] for node, (source, _) in saved.items() if source in terms}
        inputs = [saved[node][1] if node in saved else _fake(node) for node in placeholders]
        walk.run(backward, inputs, True, label(backward, True, known, history.parameters))
    return memory


def _fake(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        shape, stride = tuple(map(hint_of, value.shape)), tuple(map(hint_of, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return hint_of(value) if isinstance(value, torch.SymInt) else value


class _Walk:
    """Follows which storages are alive."""

    def __init__(self, memory: StepMemory, workspace: Workspace) -> None:
        self.memory = memory
        self.workspace = workspace
        self.buffers: dict[int, Buffer] = {}
        self.users: Counter[int] = Counter()
        self.older: dict[int, int] = {}
        self.held: list[Any] = []
        self.workspaces: dict[tuple[Any, ...], int] = {}

    def ignore(self, values: Any) -> None:
        """Storages that are older than the step count nothing."""
        self.held.append(values)
        self.older.update(_storages(values))

    def keep(self, values: Any) -> None:
        """Drop all buffers but those of ``values``."""
        kept = _storages(values)
        self.buffers = {key: buffer for key, buffer in self.buffers.items() if key in kept}
        self.users.clear()

    def run(
        self,
        graph_module: GraphModule,
        inputs: Sequence[Any],
        backward: bool,
        terms: dict[Node, Term],
    ) -> Sequence[Any]:
        """Walk one graph and return its results."""
        last = Interpreter(graph_module).user_to_last_uses
        values: dict[Node, Any] = {}
        waiting = iter(inputs)
        for node in graph_module.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = next(waiting)
            elif node.op == "get_attr":
                values[node] = getattr(graph_module, str(node.target))
            elif isinstance(node.target, StreamLoop):
                length, *operands = map_arg(list(node.args[1:]), values.__getitem__)
                values[node] = self._loop(node, length, operands, backward, terms)
            else:
                args = map_arg(node.args, values.__getitem__)
                kwargs = map_arg(node.kwargs, values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            self._add(node, values[node], terms)
            self._record(node.name, backward)
            for dead in last.get(node, ()):
                self._drop(values.pop(dead))
        results: Any = graph_module.graph.output_node().args[0]
        return list(map_arg(results, values.__getitem__))

    def _add(self, node: Node, value: Any, terms: dict[Node, Term]) -> None:
        """Note one more user of the storages of ``value``, and those that are new."""
        parts = {result.args[1]: result for result in node.users} if _is_loop(node) else {}
        values = list(value) if parts else [value]
        for index, part in enumerate(values):
            source = parts.get(index, node)
            for key, size in _storages(part).items():
                if key in self.older:
                    continue
                self.users[key] += 1
                term = terms.get(source, Term.PROLOGUE)
                self.buffers.setdefault(key, Buffer(source.name, term, size))

    def _drop(self, value: Any) -> None:
        for key in _storages(value):
            self.users[key] -= 1
            if self.users[key] <= 0:
                self.buffers.pop(key, None)

    def _record(self, name: str, backward: bool, *passing: Buffer) -> None:
        self.memory.moments.append(Moment(name, backward, (*self.buffers.values(), *passing)))

    def _loop(
        self, loop: Node, length: int, operands: list[Any], backward: bool, terms: dict[Node, Term]
    ) -> tuple[Any, ...]:
        """The results of a loop; its largest chunk is a moment of its own."""
        body, spec = body_of(loop), loop.meta["loop"]
        bounds = list(chunk_bounds(length, spec.chunk_size, spec.descending))
        start, end = max(bounds, key=lambda bound: (bound[1] - bound[0], bound[1]))
        ranges = chunk_ranges(spec, length, start, end)
        inputs = chunk_inputs(spec, length, operands, ranges)
        given = _storages(operands)
        copies = sum(size for key, size in _storages(inputs).items() if key not in given)
        key = (body.key, start, end, length)
        if key not in self.workspaces:
            self.workspaces[key] = self.workspace(body, inputs)
        workspace = copies + self.workspaces[key]
        passing = [Buffer(spec.name, Term.HEAD if spec.head else Term.CHUNK, workspace)]
        results = []
        getitems = {result.args[1]: result for result in loop.users}
        for index, (result, like) in enumerate(zip(spec.results, loop.meta["val"], strict=True)):
            if result.buffer is not None:
                total = operands[result.buffer]
                results.append(total if result.dtype is None else total.to(result.dtype))
                continue
            shape = tuple(map(hint_of, like.shape))
            results.append(torch.empty(shape, dtype=like.dtype, device=like.device))
            if len(bounds) > 1:
                term = terms.get(getitems.get(index, loop), Term.PROLOGUE)
                nbytes = results[-1].untyped_storage().nbytes()
                passing.append(Buffer(f"{spec.name}[{index}]", term, nbytes))
        self._record(spec.name, backward, *passing)
        return tuple(results)


def _is_loop(node: Node) -> bool:
    return isinstance(node.target, StreamLoop)


def _storages(values: Any) -> dict[int, int]:
    """Bytes of the storages of the tensors in ``values``."""
    found = {}
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            found[storage_id(leaf)] = leaf.untyped_storage().nbytes()
    return found

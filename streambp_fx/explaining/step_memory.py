"""Predict the memory of a training step by running it on tensors without data.

The compiled step runs as it does on real ones, autograd engine, hooks and accumulation of gradients
included, but that of each loop only the largest chunk runs, and allocates alone. Bytes are counted
above those at the step's start, with the parameters' gradients allocated, which is how a step is
measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..passes.history import distinct
from ..passes.loops import StreamLoop, chunk_bounds, chunk_inputs, chunk_ranges
from ..passes.lower import interpreter
from ..passes.pipeline import History
from ..passes.placement import hint_of
from .allocations import AllocationCounter
from .body_memory import Workspace, remembered
from .terms import Term, body_of, label_halves


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


class StepRecorder(AllocationCounter):
    """Notes what is alive at each moment of a step, while it is on.

    Args:
        workspace: the memory of a body's call.
        older: tensors that are there when the step starts; they count nothing.
    """

    def __init__(self, workspace: Workspace, older: list[Tensor]) -> None:
        super().__init__(older)
        self.memory = StepMemory()
        self.workspace = remembered(workspace)
        self.backward = False
        self.buffers: dict[int, Buffer] = {}
        self.expected: list[_Segment] = []
        self._source: tuple[str, Term] | None = None
        self._on = False

    def expect(self, segments: Sequence[History]) -> None:
        """Let the graphs of a chain run while this records: what was found in its segments."""
        self.expected += [
            _Segment(history, numbers[0], list(numbers)) for history, numbers in distinct(segments)
        ]

    def segment_of(self, graph_module: GraphModule) -> _Segment:
        """The segment of which a graph is the forward or the backward."""
        for segment in self.expected:
            if any(one is graph_module for one in segment.history.graphs.values()):
                return segment
        raise LookupError("a graph runs that was not expected")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Have graphs run without computing, and their memory noted.

        What runs between them is noted where the recorder is `on`, as it is not from the start:
        Dynamo runs no compiled code where a mode is.
        """
        token = interpreter.set(lambda graph_module: _Recording(graph_module, self))
        try:
            yield
        finally:
            interpreter.reset(token)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note what runs; once is enough."""
        if self._on:
            yield
            return
        self._on = True
        try:
            with self:
                yield
        finally:
            self._on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        between = self._source is None
        before = self.alive
        if between:
            term = Term.RESIDUAL_GRADIENT if self.backward else Term.PROLOGUE
            self._source = (str(func), term)
        try:
            results = super().__torch_dispatch__(func, types, args, kwargs)
            if between and self.alive > before:
                self.note(str(func))
            return results
        finally:
            if between:
                self._source = None

    def _allocated(self, key: int, size: int) -> None:
        if size and self._source is not None:
            self.buffers[key] = Buffer(*self._source, size)

    def _freed(self, key: int) -> None:
        self.buffers.pop(key, None)

    @contextmanager
    def making(self, name: str, term: Term) -> Iterator[None]:
        """What is allocated meanwhile is called ``name``."""
        before, self._source = self._source, (name, term)
        try:
            yield
        finally:
            self._source = before

    def note(self, name: str, *passing: Buffer) -> None:
        """Note a moment, at which there are ``passing`` besides the buffers alive."""
        self.memory.moments.append(Moment(name, self.backward, (*self.buffers.values(), *passing)))


@dataclass
class _Segment:
    """A segment, or several equal ones, of which the first has the number after which loops go.

    to_run, to_return
        The numbers of those whose forward, and whose backward, are still to run.
    """

    history: History
    first: int
    to_run: list[int] = field(default_factory=list)
    to_return: list[int] = field(default_factory=list)
    _terms: dict[Node, Term] = field(default_factory=dict)

    def enter(self, graph_module: GraphModule) -> int:
        """How much higher the number of the one that runs now is than the first."""
        if graph_module is self.history.graphs["forward"]:
            number = self.to_run.pop(0) if self.to_run else self.first
            self.to_return.append(number)
        else:
            number = self.to_return.pop() if self.to_return else self.first
        return number - self.first

    def terms(self) -> dict[Node, Term]:
        """The terms of the values of both halves."""
        if not self._terms:
            graphs = self.history.graphs
            forward, backward = graphs["forward"], graphs.get("backward")
            for labels in label_halves(forward, backward, self.history.parameters):
                self._terms.update(labels)
        return self._terms


class _Recording(Interpreter):
    """Runs a graph on tensors without data, and notes what it allocates."""

    def __init__(self, graph_module: GraphModule, recorder: StepRecorder) -> None:
        super().__init__(graph_module)
        self.recorder = recorder
        segment = recorder.segment_of(graph_module)
        self.since = segment.enter(graph_module)
        self.terms = segment.terms()

    def boxed_run(self, args_list: list[Any]) -> Any:
        with self.recorder.on(), torch.no_grad():
            self.recorder.include(args_list)
            return super().boxed_run(args_list)

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        recorder = self.recorder
        if isinstance(n.target, StreamLoop):
            return self._loop(n)
        recorder.peak = recorder.alive
        with recorder.making(n.name, self.terms.get(n, Term.PROLOGUE)):
            result = super().run_node(n)
        passing = recorder.peak - recorder.alive
        recorder.note(n.name, *([Buffer(n.name, Term.UNSTREAMED, passing)] if passing else []))
        return result

    def _loop(self, loop: Node) -> tuple[Any, ...]:
        """The results of a loop; its largest chunk is a moment of its own."""
        recorder = self.recorder
        (_, length, *operands), _ = self.fetch_args_kwargs_from_env(loop)
        body, spec = body_of(loop), loop.meta["loop"]
        name = spec.of_later_segment(self.since).name
        self.recorder.backward = spec.place.backward
        bounds = list(chunk_bounds(length, spec.chunk_size, spec.descending))
        start, end = max(bounds, key=lambda bound: (bound[1] - bound[0], bound[1]))
        ranges = chunk_ranges(spec, length, start, end)
        results = [] if len(bounds) == 1 else self._concatenated(loop)
        term = Term.HEAD if spec.head else Term.CHUNK
        with recorder.making(name, term):
            inputs = chunk_inputs(spec, length, operands, ranges)
            passing = recorder.workspace(body, inputs)
            recorder.note(name, Buffer(name, term, passing))
        del inputs
        results = results or self._concatenated(loop)
        for index, result in enumerate(spec.results):
            if result.buffer is not None:
                total = operands[result.buffer]
                with recorder.making(name, Term.PARAMETER_GRADIENTS):
                    results[index] = total if result.dtype is None else total.to(result.dtype)
        return tuple(results)

    def _concatenated(self, loop: Node) -> list[Any]:
        """New tensors for the results that chunks are concatenated to; ``None`` for sums."""
        getitems = {result.args[1]: result for result in loop.users}
        results: list[Any] = []
        for index, (result, like) in enumerate(
            zip(loop.meta["loop"].results, loop.meta["val"], strict=True)
        ):
            if result.buffer is not None:
                results.append(None)
                continue
            node = getitems.get(index, loop)
            shape = tuple(map(hint_of, like.shape))
            with self.recorder.making(node.name, self.terms.get(node, Term.PROLOGUE)):
                results.append(torch.empty(shape, dtype=like.dtype, device=like.device))
        return results

"""The bytes that are alive at each moment of a step, by term, for each way to run it.

Given:  a program, a model with few layers and a batch, on tensors without data
Result: the moments of forward and of backward, in the order of time

Weights, and gradients that are there when the step starts, are not among them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from streambp_fx._torch import FakeTensorMode, ShapeEnv

from ..explaining.allocations import AllocationCounter
from ..explaining.body_memory import Workspace, eager_workspace
from ..explaining.loss import loss_of
from ..explaining.peers import rows_not_packed, switch_on_checkpointing
from ..explaining.step_memory import Buffer, Moment
from ..explaining.terms import Term
from ..explaining.trace import Traced, without_data
from ..options import Options
from ..passes.history import distinct
from ..passes.loops import StreamLoop

Terms = Mapping[str, int]
Program = Callable[[Any, Mapping[str, Tensor]], Any]

ACTIVATIONS = "activations"
GRADIENTS = str(Term.PARAMETER_GRADIENTS)
NEGLIGIBLE = 1024
"""Bytes; ops that allocate less are left out of timelines. A model may run some of these for all of
its layers at once, where the ops that count come layer by layer."""
_UNNUMBERED = re.compile(r"\d+|(_\d+)$")


@dataclass(frozen=True)
class Instant:
    """Bytes by term while one op runs; ``kind`` is the op's name without what numbers it."""

    kind: str
    terms: Terms


@dataclass(frozen=True)
class Timeline:
    """The moments of forward and of backward."""

    forward: Sequence[Instant]
    backward: Sequence[Instant]


class PlanningError(RuntimeError):
    """The model is not one that can be planned for; the message says why."""


def streamed_step(
    program: Program, model: nn.Module, batch: Mapping[str, Tensor], *, keeps_gradients: bool
) -> Traced:
    """What the backend makes of the step; ``keeps_gradients`` as of `Setting`.

    Raises:
        PlanningError: the step is not one graph, or it is left unstreamed.
    """
    options = Options(on_barrier="ignore")
    traced = Traced(program, (model, dict(batch)), {}, options, keeps_gradients=keeps_gradients)
    if len(traced.captures) != 1:
        raise PlanningError(f"the step is traced as {len(traced.captures)} graphs, not as one")
    for segment in traced.captures[0].segments:
        if segment.unstreamed is not None:
            raise PlanningError(f"the step is not streamed: {segment.unstreamed}")
    return traced


def streamed_timeline(
    traced: Traced, chunk_size: int, head_chunk_size: int, workspace: Workspace = eager_workspace
) -> Timeline:
    """The moments of a streamed step at other chunk sizes than those that it was traced with."""
    for history, _ in distinct(traced.captures[0].segments):
        for name in ("forward", "backward"):  # there is no backward of what has no gradient
            if name in history.graphs:
                _set_chunk_sizes(history.graphs[name], chunk_size, head_chunk_size)
    moments = traced.memory(workspace).moments
    return Timeline(
        _instants([moment for moment in moments if not moment.backward]),
        _instants([moment for moment in moments if moment.backward]),
    )


def _set_chunk_sizes(graph_module: GraphModule, chunk_size: int, head_chunk_size: int) -> None:
    for node in graph_module.graph.nodes:
        if isinstance(node.target, StreamLoop):
            spec = node.meta["loop"]
            size = head_chunk_size if spec.head else chunk_size
            node.meta["loop"] = replace(spec, chunk_size=size)


def _instants(moments: Sequence[Moment]) -> list[Instant]:
    """The moments with a buffer that was not there just before; none of the others is the peak."""
    before: set[Buffer] = set()
    instants = []
    for moment in moments:
        buffers = set(moment.buffers)
        if any(buffer.nbytes >= NEGLIGIBLE for buffer in buffers - before):
            terms = {str(term): size for term, size in moment.terms().items()}
            instants.append(Instant(_UNNUMBERED.sub("", moment.node), terms))
        before = buffers
    return instants


class _Moments(AllocationCounter):
    """Notes the most bytes that are alive during each op, and those of gradients among them."""

    def __init__(self, older: list[Tensor]) -> None:
        super().__init__(older)
        self.gradients = 0
        self.moments: list[Instant] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.peak = before = self.alive
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak - before < NEGLIGIBLE:
            return results
        terms = {ACTIVATIONS: self.peak - self.gradients, GRADIENTS: self.gradients}
        self.moments.append(Instant(str(func), terms))
        return results

    def gradient_came(self, parameter: Tensor) -> None:
        """A gradient was given to ``parameter``, which had none."""
        self.gradients += parameter.untyped_storage().nbytes()


def plain_timeline(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    checkpointing: bool,
    keeps_gradients: bool,
) -> Timeline:
    """The moments of a step that runs op by op.

    Args:
        program, model, batch: the step.
        checkpointing: with Hugging Face's gradient checkpointing, not reentrant.
        keeps_gradients: as of `Setting`.

    Raises:
        PlanningError: ``checkpointing``, and the model has no such method.
    """
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), rows_not_packed():
        model, batch = without_data((model, dict(batch)))
        if checkpointing and not switch_on_checkpointing([model]):
            raise PlanningError(f"{type(model).__name__} has no gradient checkpointing")
        older = [*model.parameters(), *model.buffers(), *batch.values()]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if keeps_gradients:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
                older.append(parameter.grad)
        counter = _Moments(older)
        if not keeps_gradients:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(counter.gradient_came)
        with counter:
            loss = loss_of(program(model, batch))
            forward = len(counter.moments)
            if loss is None:
                raise PlanningError("nothing is trained: the loss requires no gradient")
            loss.backward()
    return Timeline(counter.moments[:forward], counter.moments[forward:])

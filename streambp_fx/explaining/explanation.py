"""`explain`: what the backend makes of a program, what it costs, and why it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from ..options import parse_options
from ..passes.axes import Barrier
from ..passes.causal_masks import MaskReport
from ..passes.pipeline import History
from .body_memory import CompiledWorkspace, eager_workspace
from .peers import CHECKPOINTING, COMPILED, EAGER, peer_peak
from .regions import Region, regions
from .step_memory import Moment, StepMemory, Workspace, predict
from .trace import trace


@dataclass(frozen=True)
class ExplainedGraph:
    """One graph that Dynamo captured.

    regions
        The loops, in the order in which they run.
    barriers
        Ops that run whole, with the user's source line, the reason and the bytes.
    masks
        What was proven of the mask of each attention.
    notes
        Attention that stays written out, and choices of kernels that are not honoured.
    unstreamed
        Why nothing is streamed, or ``None``.
    head_fused
        Whether forward and backward of the head are one loop.
    memory
        What is alive at each moment of a step.
    graphs
        ``normalized``: before the analyses; ``rewritten``: the joint graph with loops;
        ``forward`` and ``backward``: its halves. ``print_readable()`` shows them, loop bodies
        included, and `GraphModule.code` is Python that runs.
    seconds
        Time of each pass.
    """

    regions: tuple[Region, ...]
    barriers: tuple[Barrier, ...]
    masks: tuple[MaskReport, ...]
    notes: tuple[str, ...]
    unstreamed: str | None
    head_fused: bool
    memory: StepMemory = field(repr=False)
    graphs: Mapping[str, GraphModule] = field(repr=False)
    seconds: Mapping[str, float] = field(repr=False)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    graphs
        One for each graph that Dynamo captures; more than one after graph breaks.
    peers
        Peak bytes that the same step takes in eager, with gradient checkpointing and with
        ``torch.compile``; why not, where that could not be found.
    """

    graphs: tuple[ExplainedGraph, ...]
    peers: Mapping[str, int | str]

    @property
    def peak(self) -> Moment:
        """The moment of a step at which most bytes are allocated, above those at its start."""
        peaks = [graph.memory.peak for graph in self.graphs if graph.memory.moments]
        return max(peaks, key=lambda moment: moment.nbytes)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers of all graphs."""
        return tuple(barrier for graph in self.graphs for barrier in graph.barriers)

    def __str__(self) -> str:
        from .text import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        from .text import to_notebook

        return to_notebook(self)


class NothingCapturedError(RuntimeError):
    """Dynamo captured no graph of the program."""


def explain(
    program: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    peers: Sequence[str] = (EAGER, CHECKPOINTING, COMPILED),
    on_progress: Callable[[str], object] = lambda text: None,
    **kwargs: Any,
) -> Explanation:
    """Trace a training or evaluation step as the backend does, without running it.

    Weights are not needed: a model built under ``torch.device("meta")`` will do, as will one under
    `FakeTensorMode`. With gradients on, the step is forward and backward.

    Args:
        program: a model, or a function that calls one and computes a loss. Its tensors and modules
            are arguments, or the function itself is the module.
        args, kwargs: what it is called with.
        options: as given to ``torch.compile(..., backend="streambp", options=...)``.
        peers: the ways to compare with, of ``"eager"``, ``"gradient checkpointing"`` and
            ``"torch.compile"``. The last takes longest, since Inductor lowers the whole graph.
        on_progress: called with a line of text as things get done.

    Raises:
        OptionError: an unknown option or a bad value.
        ValueError: an unknown peer.
        NothingCapturedError: the program computes nothing that Dynamo captures.
    """
    unknown = [peer for peer in peers if peer not in (EAGER, CHECKPOINTING, COMPILED)]
    if unknown:
        raise ValueError(
            f"unknown peer {unknown[0]!r}; there are {EAGER}, {CHECKPOINTING} and {COMPILED}"
        )
    parsed = parse_options({"on_barrier": "ignore", **(options or {})})
    workspace: Workspace = eager_workspace
    if parsed.compile_bodies:
        workspace = CompiledWorkspace(dict(parsed.inductor))
    on_progress("tracing")
    histories = trace(
        program, args, kwargs, parsed, lambda history: on_progress("a graph is rewritten")
    )
    if not histories:
        raise NothingCapturedError("Dynamo captured no graph: the program calls no torch op")
    on_progress("predicting memory")
    graphs = tuple(_explained(history, workspace) for history in histories)
    peaks: dict[str, int | str] = {}
    for peer in peers:
        on_progress(f"peak of {peer}")
        peaks[peer] = _peer(peer, program, args, kwargs)
    return Explanation(graphs, peaks)


def _explained(history: History, workspace: Workspace) -> ExplainedGraph:
    return ExplainedGraph(
        tuple(regions(history)),
        tuple(history.barriers),
        tuple(history.masks),
        tuple(history.notes),
        history.unstreamed,
        history.head_fused,
        predict(history, workspace),
        dict(history.graphs),
        dict(history.seconds),
    )


def _peer(
    peer: str, program: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int | str:
    try:
        peak = peer_peak(peer, program, args, kwargs)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # A program that the backend takes may be one that fake tensors or Inductor refuse.
        return f"unknown: {error}".splitlines()[0]
    return "the program has no gradient checkpointing" if peak is None else peak

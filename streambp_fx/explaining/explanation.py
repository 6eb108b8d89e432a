"""`explain`: what the backend makes of a program, what it costs, and why it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule

from streambp_fx._torch import pytree

from ..backend import Compilation
from ..options import parse_options
from ..passes.barrier import Barrier
from ..passes.causal_masks import MaskReport
from ..passes.history import distinct
from ..passes.pipeline import History
from .body_memory import CompiledWorkspace, Workspace, eager_workspace
from .body_text import bodies
from .peers import CHECKPOINTING, COMPILED, EAGER, PeerMemory, peer_memory
from .progress import progress
from .proofs import AttentionProof, attention_proofs
from .regions import Region, regions
from .step_memory import Moment, StepMemory
from .trace import Traced

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Graphs:
    """Graphs by name, ``graphs``, that can be printed and run."""

    graphs: Mapping[str, GraphModule]

    def print_readable(self, name: str, *, print_output: bool = True) -> str:
        """The graph called ``name``, with shapes and the user's source lines.

        Raises:
            KeyError: there is no such graph.
        """
        text: str = self.graphs[name].print_readable(print_output=print_output)
        return text

    def python(self, name: str) -> str:
        """The graph called ``name``, loop bodies included, as a Python module that runs.

        ``Program().forward(*inputs)`` of that module does what the graph does.

        Raises:
            KeyError: there is no such graph.
            ValueError: it holds something that can not be written as Python.
        """
        from .source import to_python

        return to_python(self.graphs[name], f"The graph {name!r} of one program.")


@dataclass(frozen=True)
class ExplainedGraph(Graphs):
    """The joint graph of a segment, or of several equal ones.

    segments
        The numbers of the segments of which it is the graph, counted from the program's input.
        What is said of loops, operands and values is said of the first of them.
    regions
        The loops, in the order in which they run.
    bodies
        The ops of each distinct loop body as lines of text, by `Region.body`.
    barriers
        Ops that run whole, with the user's source line, the reason and the bytes.
    attentions
        What is known of the mask of each attention, and how.
    masks
        The reports of the pass that simplifies masks, of forward and backward.
    notes
        Attention that stays written out, and choices of kernels that are not honoured.
    unstreamed
        Why nothing is streamed, or ``None``.
    head_fused
        Whether forward and backward of the head are one loop.
    graphs
        ``captured``: the segment of Dynamo's graph; after each pass that works in place, by its
        name; ``rewritten``: the joint graph with loops; ``forward`` and ``backward``: its halves.
    seconds
        Time of each pass.
    """

    segments: tuple[int, ...]
    regions: tuple[Region, ...]
    bodies: Mapping[str, tuple[str, ...]] = field(repr=False)
    barriers: tuple[Barrier, ...]
    attentions: tuple[AttentionProof, ...]
    masks: tuple[MaskReport, ...]
    notes: tuple[str, ...]
    unstreamed: str | None
    head_fused: bool
    graphs: Mapping[str, GraphModule] = field(repr=False)
    seconds: Mapping[str, float] = field(repr=False)


@dataclass(frozen=True)
class Capture(Graphs):
    """A graph that Dynamo captured, as a chain of segments.

    graphs
        ``captured`` by Dynamo; after each pass on it, by its name; ``chain``: what calls segments.
    segments
        The distinct graphs of its segments, in the order of their first ones.
    barriers
        What is returned whole, with the user's source line, the reason and the bytes.
    notes
        Attention that stays written out, choices of kernels that are not honoured, and where it is
        not cut.
    """

    graphs: Mapping[str, GraphModule] = field(repr=False)
    segments: tuple[ExplainedGraph, ...]
    barriers: tuple[Barrier, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float] = field(repr=False)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as tables, in a terminal and in a notebook.

    program
        What was explained: its name, and the shapes and dtypes of its arguments.
    options
        Of the backend, as given.
    captures
        The graphs that Dynamo captures; more than one after graph breaks.
    memory
        What is alive at each moment of a step.
    peers
        Peak bytes that the same step takes in eager, with gradient checkpointing and with
        ``torch.compile``; why not, where that could not be found.
    peer_courses
        For each of them that was found, the bytes alive after each allocation and each free.
    """

    program: str
    options: Mapping[str, Any]
    captures: tuple[Capture, ...]
    memory: StepMemory = field(repr=False)
    peers: Mapping[str, int | str]
    peer_courses: Mapping[str, tuple[int, ...]] = field(repr=False)

    @property
    def peak(self) -> Moment:
        """The moment of a step at which most bytes are allocated, above those at its start."""
        return self.memory.peak

    @property
    def graphs(self) -> tuple[ExplainedGraph, ...]:
        """The distinct graphs of all segments."""
        return tuple(graph for capture in self.captures for graph in capture.segments)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """The barriers of all graphs; those of equal segments once."""
        found = [barrier for capture in self.captures for barrier in capture.barriers]
        return (*found, *(barrier for graph in self.graphs for barrier in graph.barriers))

    @property
    def streams_everything(self) -> bool:
        """Whether nothing is left that runs on the whole sequence."""
        return not self.barriers and all(graph.unstreamed is None for graph in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """All of the report but its graphs, of values that JSON has."""
        from .data import as_data

        return as_data(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one page that needs no other file and no network.

        Returns:
            The path that was written.
        """
        from .page import to_page

        path = Path(path)
        path.write_text(to_page(self), encoding="utf-8")
        return path

    def plot_memory(self) -> Figure:
        """A figure of the memory over one step by term, and of the ways it is compared with.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .plots import plot_memory

        return plot_memory(self)

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
    on_progress: Callable[[str], object] | None = None,
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
        on_progress: called with a line of text as things get done; by default a terminal shows a
            bar.

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
    with progress(on_progress, 3 + len(peers)) as report:
        report("tracing")
        traced = Traced(program, args, kwargs, parsed, lambda: report("the passes have run"))
        if not traced.captures:
            raise NothingCapturedError("Dynamo captured no graph: the program calls no torch op")
        report("predicting memory")
        memory = traced.memory(workspace)
        captures = tuple(map(_capture, traced.captures))
        peaks: dict[str, int | str] = {}
        courses: dict[str, tuple[int, ...]] = {}
        for peer in peers:
            report(f"memory of {peer}")
            found = _peer(peer, program, args, kwargs)
            if isinstance(found, PeerMemory):
                peaks[peer], courses[peer] = found.peak, found.course
            else:
                peaks[peer] = found
    described = _describe(program, args, kwargs)
    return Explanation(described, dict(options or {}), captures, memory, peaks, courses)


def _capture(compilation: Compilation) -> Capture:
    found = compilation.history
    return Capture(
        dict(found.graphs),
        tuple(_explained(*shared) for shared in distinct(compilation.segments)),
        tuple(found.barriers),
        tuple(found.notes),
        dict(found.seconds),
    )


def _explained(history: History, segments: tuple[int, ...]) -> ExplainedGraph:
    return ExplainedGraph(
        segments,
        tuple(regions(history)),
        bodies(history),
        tuple(history.barriers),
        tuple(attention_proofs(history)),
        tuple(history.masks),
        tuple(history.notes),
        history.unstreamed,
        history.head_fused,
        dict(history.graphs),
        dict(history.seconds),
    )


def _peer(
    peer: str, program: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> PeerMemory | str:
    try:
        found = peer_memory(peer, program, args, kwargs)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, TypeError) as error:
        # A program that the backend takes may be one that fake tensors or Inductor refuse.
        return f"unknown: {error}".splitlines()[0]
    return "the program has no gradient checkpointing" if found is None else found


def _describe(program: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """``Model(input_ids int64[1, 4096])``."""
    name = getattr(program, "__name__", type(program).__name__)
    parts = [_describe_value(value) for value in args]
    parts += [f"{key} {_describe_value(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(parts)})"


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(map(int, value.shape))}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return f"{type(value).__name__} of {len(leaves)} tensors"

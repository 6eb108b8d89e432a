"""What the passes are told, and what one run of them went through."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.fx import Graph, GraphModule

from .barrier import Barrier
from .body_builder import RewriteError
from .causal_masks import MaskReport
from .loops import LoopSpec
from .rules.spec import Size

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What the passes need to know of the user's options.

    chunk_size, head_chunk_size
        Tokens of each row in a chunk; ``None`` for the default.
    accumulation
        Dtype of sums over chunks of bf16 and fp16 values; ``None`` keeps theirs.
    for_accelerator
        Choose chunk sizes as on an accelerator, whatever the device of the traced tensors.
    widest
        The graph is a segment of a program, without a waist: bytes of the widest value of that
        program, which makes a head. ``None`` of a graph that is a program.
    segment
        The number of the graph's first segment.
    attended
        The lengths, and the rows, of attention in the whole program.
    """

    chunk_size: int | None = None
    head_chunk_size: int | None = None
    accumulation: torch.dtype | None = torch.float32
    for_accelerator: bool = False
    widest: int | None = None
    segment: int = 0
    attended: tuple[tuple[Size, Size], ...] = ()


@dataclass
class History:
    """What one run of the passes went through.

    graphs
        ``normalized`` and ``rewritten``: the graph before the analyses and the one with loops;
        ``forward`` and ``backward``: its halves, which run.
    keep_copies
        Also keep a copy of the graph after each pass that works in place, by the pass's name.
    tokens
        The length of the sequence axis in the traced example; 0 where there is none.
    parameters
        The names of the placeholders that are parameters.
    running
        The name of the pass that is running, or failed.
    masks
        What was proven of each attention's mask.
    notes
        What the user may want to know of the Dynamo graph: attention that stays written out, and
        choices of kernels that are not honoured.
    """

    graphs: dict[str, GraphModule] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    barriers: list[Barrier] = field(default_factory=list)
    loops: list[LoopSpec] = field(default_factory=list)
    unstreamed: str | None = None
    head_fused: bool = False
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    masks: list[MaskReport] = field(default_factory=list)
    keep_copies: bool = False
    running: str = ""

    def refuse(self, error: Exception) -> None:
        """Note that nothing is streamed, because of an error of the pass that is running."""
        reason, *_ = str(error).splitlines() or [""]
        if not isinstance(error, RewriteError):
            reason = f"{self.running or 'a pass'} failed: {type(error).__name__}: {reason}"
        self.unstreamed = reason
        self.graphs.pop("rewritten", None)
        self.loops.clear()
        self.head_fused = False

    def keep(self, name: str, graph_module: GraphModule) -> None:
        """Keep a copy of a graph that later passes change, where copies are wanted."""
        if self.keep_copies:
            copied = Graph()
            copied.output(copied.graph_copy(graph_module.graph, {}))
            self.graphs[name] = GraphModule(graph_module, copied)


def distinct(segments: Sequence[History]) -> list[tuple[History, tuple[int, ...]]]:
    """What was found in each distinct segment, and the numbers of those that share it, in order."""
    numbers: dict[int, list[int]] = {}
    for number, one in enumerate(segments):
        numbers.setdefault(id(one), []).append(number)
    return [(segments[shared[0]], tuple(shared)) for shared in numbers.values()]


def timed(history: History, name: str, run: Callable[[], T]) -> T:
    """What ``run`` returns; its seconds are added to those of the pass ``name``."""
    start = time.perf_counter()
    history.running = name
    result = run()
    history.running = ""
    history.seconds[name] = history.seconds.get(name, 0.0) + time.perf_counter() - start
    return result

"""The passes, in order.

    replay_random_ops    random numbers become a function of a seed and the position
    normalize            aliases and repeats go
    compare_one_hots     scatters of one value become comparisons
    normalize_kernels    attention kernels that calls hid become our op
    simplify_causal_masks  masks that are proven causal are never built
    find_axes            where the sequence axis runs, what is a barrier
    choose_cuts          which forward values are kept
    assign_stages        which segment each backward node belongs to
    fuse_head            the head's backward joins its forward loop, where that is right
    rewrite              loops
    check_rewritten      invariants of the result

The graphs are kept in `History`, with the seconds each pass took.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch.fx import GraphModule, Node

from streambp_fx._torch import detect_fake_mode

from .axes import ATTENTION, Axes, Barrier, find_axes
from .body_builder import RewriteError
from .causal_masks import MaskReport, simplify_causal_masks
from .check import check_rewritten
from .chunk_size import chunk_sizes
from .cuts import Segments, choose_cuts
from .dataflow import JointGraph, read_joint
from .fuse_head import fuse_head
from .inputs import (
    InputRole,
    SequenceAxis,
    find_sequence_axes,
    label_tangents,
    read_roles,
)
from .loops import LoopSpec
from .normalize import normalize
from .normalize_kernels import normalize_kernels
from .one_hot import compare_one_hots
from .placement import hint_of, source_of
from .random_ops import replay_random_ops
from .rewrite import Rewritten, rewrite
from .stages import assign_stages

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What the passes need to know of the user's options.

    chunk_size, head_chunk_size
        Tokens of each row in a chunk; ``None`` for the default.
    accumulation
        Dtype of sums over chunks of bf16 and fp16 values; ``None`` keeps theirs.
    """

    chunk_size: int | None = None
    head_chunk_size: int | None = None
    accumulation: torch.dtype | None = torch.float32


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

    def keep(self, name: str, graph_module: GraphModule) -> None:
        """Keep a copy of a graph that later passes change, where copies are wanted."""
        if self.keep_copies:
            copied = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
            self.graphs[name] = copied


def stream(
    graph_module: GraphModule,
    num_forward_outputs: int,
    input_roles: Sequence[InputRole],
    settings: Settings,
    history: History,
) -> Rewritten | None:
    """Rewrite a joint (or forward-only) graph; ``None``, with the reason, where nothing streams."""
    left = _timed(history, "replay_random_ops", lambda: replay_random_ops(graph_module))
    history.barriers += [
        Barrier(
            str(node.target), source_of(node), f"its random numbers can not be drawn again: {why}"
        )
        for node, why in left
    ]
    history.keep("replay_random_ops", graph_module)
    guards = _guards(graph_module)
    normal = _timed(history, "normalize", lambda: normalize(graph_module))
    history.graphs["normalized"] = normal
    history.keep("normalize", normal)
    _timed(history, "compare_one_hots", lambda: compare_one_hots(normal))
    _timed(history, "normalize_kernels", lambda: normalize_kernels(normal))
    history.keep("normalize_kernels", normal)
    history.masks = _timed(history, "simplify_causal_masks", lambda: simplify_causal_masks(normal))
    history.keep("simplify_causal_masks", normal)
    joint = read_joint(normal.graph, num_forward_outputs)
    roles = read_roles(joint, input_roles)
    parameters = {node for node, role in roles.items() if role is InputRole.PARAMETER}
    history.parameters = {node.name for node in parameters}
    axis = _choose_axis(joint, find_sequence_axes(joint, roles), parameters)
    if axis is None:
        history.unstreamed = "no input has a sequence axis of two or more tokens"
        return None
    history.tokens = hint_of(axis.length)
    analysis = _analyse(joint, axis, parameters, history)
    if analysis is not None and joint.tangents:
        fused = _timed(history, "fuse_head", partial(fuse_head, joint, *analysis))
        if fused is not None:
            history.head_fused = True
            history.keep("fuse_head", normal)
            joint = read_joint(normal.graph, num_forward_outputs, fused.kept, fused.scaled)
            analysis = _analyse(joint, axis, parameters, history)
    if analysis is None:
        history.unstreamed = "no value of the graph carries the sequence axis"
        return None
    axes, segments, stages = analysis
    history.barriers += axes.barriers
    sizes = chunk_sizes(
        axes,
        list(normal.graph.nodes),
        axis.batch,
        settings.chunk_size,
        settings.head_chunk_size,
    )
    try:
        rewritten = _timed(
            history,
            "rewrite",
            lambda: rewrite(joint, axes, segments, stages, sizes, settings.accumulation),
        )
        _timed(history, "check_rewritten", lambda: check_rewritten(rewritten, joint))
        _check_guards(normal, guards)
    except RewriteError as error:
        history.unstreamed = str(error)
        return None
    history.graphs["rewritten"] = rewritten.graph_module
    history.loops += rewritten.loops
    return rewritten


def _choose_axis(
    joint: JointGraph, candidates: list[SequenceAxis], parameters: set[Node]
) -> SequenceAxis | None:
    """The likeliest of the candidates along which most attention calls stream."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None

    def streamed(axis: SequenceAxis) -> int:
        axes = find_axes(joint.graph, axis.length, axis.inputs, parameters, joint.scaled)
        return sum(axes.in_loop(node) for node in joint.order if node.target is ATTENTION)

    return max(candidates, key=streamed)


def _guards(graph_module: GraphModule) -> int:
    """How many guards the shape environment of a traced graph has."""
    mode = detect_fake_mode([node.meta.get("val") for node in graph_module.graph.nodes])
    return 0 if mode is None or mode.shape_env is None else len(mode.shape_env.guards)


def _check_guards(graph_module: GraphModule, before: int) -> None:
    """Raise if the passes added a guard, which would make a new length recompile."""
    added = _guards(graph_module) - before
    if added:
        raise RewriteError(f"the passes added {added} guards on the sequence length")


def _analyse(
    joint: JointGraph, axis: SequenceAxis, parameters: set[Node], history: History
) -> tuple[Axes, Segments, dict[Node, int]] | None:
    """Axes, segments and stages of a joint graph; ``None`` where nothing is streamed."""
    axes = _timed(history, "find_axes", lambda: _propagate(joint, axis, parameters))
    if not any(axes.in_loop(node) for node in joint.graph.nodes):
        return None
    segments = _timed(history, "choose_cuts", lambda: choose_cuts(joint, axes))
    stages = _timed(history, "assign_stages", lambda: assign_stages(joint, axes, segments))
    return axes, segments, stages


def _propagate(joint: JointGraph, axis: SequenceAxis, parameters: set[Node]) -> Axes:
    """Propagate through the forward, give the tangents the positions of their outputs, go on."""
    if not joint.tangents:
        return find_axes(joint.graph, axis.length, axis.inputs, parameters, joint.scaled)
    forward = find_axes(joint.graph, axis.length, axis.inputs, parameters, joint.scaled)
    inputs = {**axis.inputs, **label_tangents(joint, forward)}
    if len(inputs) == len(axis.inputs):
        return forward
    return find_axes(joint.graph, axis.length, inputs, parameters, joint.scaled)


def _timed(history: History, name: str, run: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = run()
    history.seconds[name] = history.seconds.get(name, 0.0) + time.perf_counter() - start
    return result

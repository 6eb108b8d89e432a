"""The passes that stream a graph along one sequence axis.

    find_axes            where the sequence axis runs, what is a barrier
    choose_cuts          which forward values are kept
    assign_stages        which segment each backward node belongs to
    fuse_head            the head's backward joins its forward loop, where that is right
    rewrite              loops
    check_rewritten      invariants of the result

A program may have sequences of several lengths, as when a model is called on chosen and on
rejected answers. Each further length is streamed in the graph that the last one left, where the
loops that are there already are calls like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.fx import GraphModule, Node

from .axes import ANOTHER_LENGTH, ATTENTION, Axes, find_axes
from .barrier import Barrier
from .check import check_rewritten
from .chunk_size import chunk_sizes
from .cuts import Segments, choose_cuts
from .dataflow import JointGraph, bytes_of, read_joint
from .fuse_head import fuse_head
from .history import History, Settings, timed
from .inputs import (
    InputRole,
    SequenceAxis,
    find_sequence_axes,
    has_one_token,
    label_tangents,
    read_roles,
)
from .large_values import computes_large_values
from .placement import hint_of
from .rewrite import Rewritten, rewrite
from .rules.sizes import same_size
from .rules.spec import Size
from .stages import assign_stages

HANDED_ON = "a product of tokens with tokens, which one loop makes whole for another"


def stream_along_one_axis(
    graph_module: GraphModule,
    num_forward_outputs: int,
    input_roles: Sequence[InputRole],
    settings: Settings,
    history: History,
    lengths: list[Size],
) -> Rewritten | None:
    """Rewrite a normalised graph; ``None``, with the reason, where nothing streams.

    ``lengths`` are those that were streamed before; the new one is added.

    Raises:
        RewriteError: the passes contradict each other.
    """
    joint = read_joint(graph_module.graph, num_forward_outputs)
    roles = read_roles(joint, input_roles)
    parameters = {node for node, role in roles.items() if role is InputRole.PARAMETER}
    history.parameters = {node.name for node in parameters}
    candidates = [
        axis
        for axis in find_sequence_axes(joint, roles, settings.attended)
        if not any(same_size(axis.length, length) for length in lengths)
    ]
    axis = _choose_axis(joint, candidates, parameters)
    if axis is None:
        if has_one_token(joint, roles):
            history.notes.append("nothing to stream: the sequence is one token long")
        elif not lengths:
            _leave(history, "no input has a sequence axis", joint, axis, parameters)
        return None
    analysis = _analyse(joint, axis, parameters, settings, history)
    if analysis is not None and joint.tangents:
        fused = timed(history, "fuse_head", partial(fuse_head, joint, *analysis))
        if fused is not None:
            history.head_fused = True
            history.keep("fuse_head", graph_module)
            joint = read_joint(graph_module.graph, num_forward_outputs, fused.kept, fused.scaled)
            analysis = _analyse(joint, axis, parameters, settings, history)
    if analysis is None:
        if not lengths:
            reason = "no value of the graph carries the sequence axis"
            _leave(history, reason, joint, axis, parameters)
        return None
    axes, segments, stages = analysis
    sizes = chunk_sizes(
        axes,
        list(graph_module.graph.nodes),
        axis.batch,
        settings.chunk_size,
        settings.head_chunk_size,
        for_accelerator=settings.for_accelerator,
        widest=settings.widest,
    )
    rewritten = timed(
        history,
        "rewrite",
        lambda: rewrite(
            joint,
            axes,
            segments,
            stages,
            sizes,
            settings.accumulation,
            settings.segment,
            len(lengths),
        ),
    )
    timed(history, "check_rewritten", lambda: check_rewritten(rewritten, joint))
    # Attention over another length was a barrier until now, or is none that this one streams.
    history.barriers = [one for one in history.barriers if one.reason != ANOTHER_LENGTH]
    history.barriers += axes.barriers
    history.barriers += [
        Barrier.at(node, HANDED_ON, bytes_of(node), backward=node in joint.dependent)
        for node in rewritten.handed_on
    ]
    history.loops += rewritten.loops
    history.tokens = max(history.tokens, hint_of(axis.length))
    lengths.append(axis.length)
    return rewritten


def _leave(
    history: History,
    reason: str,
    joint: JointGraph,
    axis: SequenceAxis | None,
    parameters: set[Node],
) -> None:
    """Note why nothing is streamed; it is a problem where something large stays whole."""
    if computes_large_values(joint, axis, parameters):
        history.unstreamed = reason
    else:
        history.notes.append(f"nothing to stream: {reason}, and no value is large")


def _choose_axis(
    joint: JointGraph, candidates: list[SequenceAxis], parameters: set[Node]
) -> SequenceAxis | None:
    """The candidate along which most attention calls stream, and else most bytes."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None

    def streamed(axis: SequenceAxis) -> tuple[int, int]:
        axes = find_axes(joint.graph, axis.length, axis.inputs, parameters, joint.scaled)
        looped = [node for node in joint.order if axes.in_loop(node)]
        return sum(node.target is ATTENTION for node in looped), sum(map(bytes_of, looped))

    return max(candidates, key=streamed)


def _analyse(
    joint: JointGraph,
    axis: SequenceAxis,
    parameters: set[Node],
    settings: Settings,
    history: History,
) -> tuple[Axes, Segments, dict[Node, int]] | None:
    """Axes, segments and stages of a joint graph; ``None`` where nothing is streamed."""
    axes = timed(history, "find_axes", lambda: _propagate(joint, axis, parameters))
    if not any(axes.in_loop(node) for node in joint.graph.nodes):
        return None
    segments = timed(
        history,
        "choose_cuts",
        lambda: choose_cuts(joint, axes, is_segment=settings.widest is not None),
    )
    stages = timed(history, "assign_stages", lambda: assign_stages(joint, axes, segments))
    return axes, segments, stages


def _propagate(joint: JointGraph, axis: SequenceAxis, parameters: set[Node]) -> Axes:
    """Propagate through the forward, give the tangents the positions of their outputs, go on."""
    find = partial(
        find_axes,
        joint.graph,
        axis.length,
        parameters=parameters,
        whole=joint.scaled,
        dependent=joint.dependent,
    )
    forward = find(axis.inputs)
    inputs = {**axis.inputs, **label_tangents(joint, forward)}
    return forward if len(inputs) == len(axis.inputs) else find(inputs)

"""Pass: run the head's forward and backward in one loop, with a unit tangent.

Gradients that are linear in the loss's tangent can be made in forward, as if the tangent were 1,
and scaled by the real one in backward; the logits of a chunk are then computed once instead of
twice.

Given:   loss = sum(f(h @ W)) / n;      dh, dW = head_backward(tangent, h, W)
Result:  loss = sum(f(h @ W)) / n;      dh1, dW1 = head_backward(1, h, W)       # in forward
         dh = dh1 * tangent;            dW = dW1 * tangent     # scale_saved, in backward

It is right where the only tangent is the loss's and everything in backward is that tangent times a
constant (`linearity` checks the ops); it is possible where the head's backward waits for no sum
over the whole sequence (a token count comes from the labels alone, and does not). Backward
multiplies in place what nothing else reads, unless it may run again (`streambp_fx.ops.scale`). In
fp16 a unit tangent divided by the token count underflows, before a gradient scaler could help, so
the head keeps two loops there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Node

import streambp_fx.ops.scale  # noqa: F401  (defines the op)
from streambp_fx._torch import storage_id

from .axes import Axes, Kind
from .cuts import Segments
from .dataflow import JointGraph, ancestors, storage_of
from .linearity import is_linear
from .placement import value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class FusedHead:
    """What forward now keeps for backward, and the products with the tangent that backward makes.

    The products run whole, outside loops: inside, they would make the last layer's loop unlike
    the other layers'.
    """

    kept: list[Node]
    scaled: list[Node]


def fuse_head(
    joint: JointGraph, axes: Axes, segments: Segments, stage: dict[Node, int]
) -> FusedHead | None:
    """Move the last stage of ``joint`` into forward, in place.

    Returns:
        The values that forward now keeps for backward, or ``None`` where the head can not be
        fused and the graph is unchanged.
    """
    last = segments.count - 1
    own = [node for node in joint.graph.nodes if stage.get(node) == last]
    tangent = _only_tangent(joint)
    if tangent is None or not _may_fuse(joint, axes, segments, own, last):
        return None
    with joint.graph.inserting_before(own[0]):
        one = joint.graph.call_function(
            aten.full.default,
            ([], 1.0),
            {"dtype": value_of(tangent).dtype, "device": value_of(tangent).device},
        )
        one.meta["val"] = value_of(tangent).new_empty(())
        unit = _like_tangent(joint, one, tangent)
    inside = set(own)
    for node in own:
        node.replace_input_with(tangent, unit)
    leaving = [node for node in own if any(user not in inside for user in node.users)]
    shared = Counter(map(_memory_of, leaving))
    scaled = [
        _scale(joint, node, tangent, inside, alone=shared[_memory_of(node)] == 1)
        for node in leaving
    ]
    return FusedHead(leaving, scaled)


def _only_tangent(joint: JointGraph) -> Node | None:
    """The tangent, if there is one alone and it is a scalar wide enough for a unit one."""
    used = [node for node in joint.tangents if node.users]
    if len(used) != 1:
        return None
    value = value_of(used[0])
    scalar = isinstance(value, torch.Tensor) and all(
        isinstance(size, int) and size == 1 for size in value.shape
    )
    return used[0] if scalar and value.dtype != torch.float16 else None


def _may_fuse(
    joint: JointGraph, axes: Axes, segments: Segments, own: list[Node], last: int
) -> bool:
    if not any(axes.in_loop(node) for node in own):
        return False
    head = [node for node, index in segments.segment.items() if index == last]
    if any(axes.attends(node) for node in head):
        return False
    if any(_dtype(node) == torch.float16 for node in (*head, *own)):
        return False
    if not all(is_linear(node, joint.dependent) for node in own):
        return False
    inside = set(own)
    if any(not _is_float(node) for node in own if any(user not in inside for user in node.users)):
        return False
    loops = [node for node in own if axes.in_loop(node)]
    before = ancestors(loops) - joint.dependent
    sums = {node for node in head if axes.kind[node] is Kind.SUM}
    # A sum that the head's backward reads is complete only when its forward loop has ended.
    return not (sums & before)


def _is_float(node: Node) -> bool:
    """Whether the node's value is one floating tensor, which can be scaled."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _memory_of(node: Node) -> int:
    """What the values of two nodes have in common that share memory."""
    # Traced values are fake, but views of each other where the real ones will be.
    return storage_id(value_of(storage_of(node)))


def _dtype(node: Node) -> torch.dtype | None:
    value = value_of(node)
    return value.dtype if isinstance(value, torch.Tensor) else None


def _like_tangent(joint: JointGraph, one: Node, tangent: Node) -> Node:
    """``one`` with the tangent's shape."""
    shape = list(value_of(tangent).shape)
    if not shape:
        return one
    unit = joint.graph.call_function(aten.expand.default, (one, shape))
    unit.meta["val"] = value_of(tangent)
    return unit


def _scale(joint: JointGraph, node: Node, tangent: Node, inside: set[Node], *, alone: bool) -> Node:
    """Hand ``node * tangent`` to every reader outside of the head, in place if ``alone``."""
    with joint.graph.inserting_after(node):
        factor = tangent
        if value_of(tangent).dim():
            factor = joint.graph.call_function(aten.reshape.default, (tangent, []))
            factor.meta["val"] = value_of(tangent).new_empty(())
    with joint.graph.inserting_after(factor if factor is not tangent else node):
        target = torch.ops.streambp.scale_saved.default if alone else aten.mul.Tensor
        scaled = joint.graph.call_function(target, (node, factor))
        scaled.meta = dict(node.meta)
    node.replace_all_uses_with(
        scaled, delete_user_cb=lambda user: user not in inside and user is not scaled
    )
    return scaled

"""Pass: give every backward node to the segment whose backward it is.

A backward node is *pinned* to segment k if it reads a value from inside segment k. Between pins
the boundary is put where the fewest bytes cross: at the gradient of the residual stream.

Given:  ... = mul(dY1, silu1)      reads silu1, inside segment 1: pinned to stage 1
        dh1 = add(dX1, dres)       unpinned
        dX0 = mm(dh1, W0)          unpinned, wide
        ... = mul(dX0, silu0)      pinned to stage 0
Result: stage(dh1) = 1, stage(dX0) = 0: only dh1 crosses
"""

from __future__ import annotations

from torch.fx import Node

from .axes import Axes, Kind
from .cuts import Segments
from .dataflow import JointGraph, bytes_of, storage_of


def assign_stages(joint: JointGraph, axes: Axes, segments: Segments) -> dict[Node, int]:
    """The stage of every node that depends on a tangent (stages run from last to first)."""
    backward = [
        node for node in joint.graph.nodes if node in joint.dependent and node.op == "call_function"
    ]
    owner = owners(joint, axes, segments)
    pins = _pins(backward, axes, owner) | _gradient_pins(joint, axes, segments, owner)
    pins |= dict.fromkeys(joint.scaled, segments.count - 1)
    lowest, highest = _descendant_pins(backward, pins)
    stage: dict[Node, int] = {}
    for current in range(segments.count - 1, 0, -1):
        _fill_stage(current, backward, pins, lowest, highest, stage, joint)
    for node in backward:
        stage.setdefault(node, 0)
    return stage


def owners(joint: JointGraph, axes: Axes, segments: Segments) -> dict[Node, int]:
    """The segment of every tangent-free node inside loops; values available on both sides of a
    cut (the cut values and their views), and those that forward keeps anyway, have none."""
    cut_values = segments.cut_values() | set(joint.kept)
    owner: dict[Node, int] = {}
    for node in joint.graph.nodes:
        if node in joint.dependent or (not axes.in_loop(node) and node not in axes.after_loop):
            continue
        if storage_of(node) in cut_values:
            continue
        if node in segments.segment:
            owner[node] = segments.segment[node]
        else:
            places = [owner[arg] for arg in node.all_input_nodes if arg in owner]
            if places:
                owner[node] = max(places)
    return owner


def _pins(backward: list[Node], axes: Axes, owner: dict[Node, int]) -> dict[Node, int]:
    pins: dict[Node, int] = {}
    for node in backward:
        read = [owner[arg] for arg in node.all_input_nodes if arg in owner and axes.in_loop(arg)]
        if read:
            pins[node] = min(read)
    return pins


def _gradient_pins(
    joint: JointGraph, axes: Axes, segments: Segments, owner: dict[Node, int]
) -> dict[Node, int]:
    """Pins of weight gradients that read nothing inside a segment, such as an embedding's.

    They belong to the segment that reads the weight, so that the layer that happens to come before
    in backward stays like the other layers.
    """
    pins: dict[Node, int] = {}
    for primal, gradient in zip(joint.primals, joint.backward_outputs, strict=False):
        node = gradient
        while isinstance(node, Node) and axes.kind.get(node) is Kind.GLUE:
            inputs = [arg for arg in node.all_input_nodes if arg in joint.dependent]
            node = inputs[0] if len(inputs) == 1 else None
        if not isinstance(node, Node) or axes.kind.get(node) is not Kind.SUM:
            continue
        if any(arg in owner for arg in node.all_input_nodes):
            continue
        readers = [segments.segment[user] for user in primal.users if user in segments.segment]
        if readers:
            pins[node] = min(readers)
    return pins


def _descendant_pins(
    backward: list[Node], pins: dict[Node, int]
) -> tuple[dict[Node, int], dict[Node, int]]:
    """The lowest and highest pin among a node and its descendants."""
    lowest: dict[Node, int] = {}
    highest: dict[Node, int] = {}
    for node in reversed(backward):
        low = [lowest[user] for user in node.users if user in lowest]
        high = [highest[user] for user in node.users if user in highest]
        if node in pins:
            low.append(pins[node])
            high.append(pins[node])
        if low:
            lowest[node] = min(low)
            highest[node] = max(high)
    return lowest, highest


def _fill_stage(
    current: int,
    backward: list[Node],
    pins: dict[Node, int],
    lowest: dict[Node, int],
    highest: dict[Node, int],
    stage: dict[Node, int],
    joint: JointGraph,
) -> None:
    """Choose the nodes of stage ``current`` among those not yet in a later stage."""
    candidates: dict[Node, None] = {}
    for node in backward:
        if node in stage or pins.get(node, current) < current:
            continue
        inputs = [arg for arg in node.all_input_nodes if arg in joint.dependent]
        if all(arg in stage or arg in candidates or arg.op == "placeholder" for arg in inputs):
            candidates[node] = None
    # Pinned here, above a node pinned here, or with nothing pinned below: no choice.
    fixed = {
        node
        for node in candidates
        if highest.get(node, -1) >= current or lowest.get(node, current) >= current
    }
    slack = [node for node in candidates if node not in fixed]
    taken = fixed | set(slack[: _best_prefix(slack, fixed, stage)])
    for node in candidates:
        # A node with nothing pinned below may read one that was left to the next stage: it follows.
        inputs = [arg for arg in node.all_input_nodes if arg in candidates]
        if node in taken and all(arg in stage for arg in inputs):
            stage[node] = current


def _best_prefix(slack: list[Node], fixed: set[Node], stage: dict[Node, int]) -> int:
    """How many of ``slack`` to take so that the fewest bytes cross to the next stage."""
    here = set(fixed)
    best, fewest = 0, None
    for count in range(len(slack) + 1):
        if count:
            here.add(slack[count - 1])
        crossing: dict[Node, int] = {}
        # Values of earlier stages that are still needed cross as well.
        for node in slack[:count]:
            _note_crossing(node, here, stage, crossing)
        for node in fixed:
            _note_crossing(node, here, stage, crossing)
        for node in {arg for user in slack for arg in user.all_input_nodes if arg in stage}:
            _note_crossing(node, here, stage, crossing)
        total = sum(crossing.values())
        if fewest is None or total < fewest:
            best, fewest = count, total
    return best


def _note_crossing(
    node: Node, here: set[Node], stage: dict[Node, int], crossing: dict[Node, int]
) -> None:
    """Record the memory of ``node`` if a node outside ``here`` still reads it."""
    for user in node.users:
        if user.op != "output" and user not in here and user not in stage:
            owner = storage_of(node)
            crossing[owner] = bytes_of(owner)
            return

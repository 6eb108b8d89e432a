"""Find the sequence axis among the inputs.

Token ids are ``[B, T]`` integers, embeddings ``[B, T, d]`` floats. The position found here is a
label: a wrong one costs memory (nothing streams along it), never correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch.fx import Node

from .axes import ATTENTION, Axes
from .dataflow import JointGraph, dtype_and_shape
from .placement import Size, Streamed, hint_of, value_of
from .rules.sizes import same_size


class InputRole(Enum):
    """What an input is to the model: only data can carry the sequence axis."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    DATA = "data"


@dataclass(frozen=True)
class SequenceAxis:
    """The length of the sequence axis, in tokens, the rows beside it, and where inputs carry it."""

    length: Size
    batch: int
    inputs: dict[Node, Streamed]


def find_sequence_axes(
    joint: JointGraph,
    roles: dict[Node, InputRole],
    attended: Sequence[tuple[Size, Size]] = (),
) -> list[SequenceAxis]:
    """What the sequence axis may be, the likeliest first; empty where there is none to stream.

    That of the data inputs; then the lengths of attention, longest first, which a program may have
    put together from several inputs (``cat([prompt, completion], 1)``).

    ``attended`` are the lengths, and the rows, of attention elsewhere in the program.
    """
    data = _data_inputs(joint, roles)
    found: list[tuple[Size, int]] = []
    lead = _leading_input(data)
    if lead is not None:
        node, dim = lead
        shape = value_of(node).shape
        found.append((shape[dim], hint_of(shape[0]) if dim > 0 else 1))
    queries = [
        value_of(node.all_input_nodes[0]).shape for node in joint.order if node.target is ATTENTION
    ]
    every = [*((shape[2], shape[0]) for shape in queries), *attended]
    for length, batch in sorted(every, key=lambda one: -hint_of(one[0])):
        if not any(same_size(length, other) for other, _ in found):
            found.append((length, hint_of(batch)))
    return [_axis(data, length, batch) for length, batch in found if hint_of(length) >= 2]


def has_one_token(joint: JointGraph, roles: dict[Node, InputRole]) -> bool:
    """Whether there is a sequence, and it is shorter than two tokens."""
    lead = _leading_input(_data_inputs(joint, roles))
    return lead is not None and hint_of(value_of(lead[0]).shape[lead[1]]) < 2


def _data_inputs(joint: JointGraph, roles: dict[Node, InputRole]) -> list[Node]:
    return [
        node
        for node in joint.primals
        if roles[node] is InputRole.DATA and isinstance(value_of(node), torch.Tensor)
    ]


def _axis(data: list[Node], length: Size, batch: int) -> SequenceAxis:
    inputs: dict[Node, Streamed] = {}
    for other in data:
        at = _dim_of_length(value_of(other), length)
        if at is not None:
            inputs[other] = Streamed(at)
    return SequenceAxis(length, batch, inputs)


def read_roles(joint: JointGraph, roles: Sequence[InputRole]) -> dict[Node, InputRole]:
    """The role of each primal; one beyond ``roles`` (AOTAutograd added it) counts as data."""
    given = dict(zip(joint.primals, roles, strict=False))
    return {node: given.get(node, InputRole.DATA) for node in joint.primals}


def _leading_input(data: list[Node]) -> tuple[Node, int] | None:
    """The input that most likely says which axis is the sequence, and its dim."""
    ranked: list[tuple[int, Node, int]] = []
    for node in data:
        value = value_of(node)
        integral = not value.is_floating_point() and not value.is_complex()
        if value.dim() == 2 and integral:
            ranked.append((0, node, 1))
        elif value.dim() == 3:
            ranked.append((1, node, 1))
        elif value.dim() == 1 and integral and value.dtype != torch.bool:
            ranked.append((2, node, 0))
        elif value.dim() == 2:
            ranked.append((3, node, 0))
        elif value.dim() >= 4:
            ranked.append((4, node, value.dim() - 2))
    if not ranked:
        return None
    best = min(rank for rank, _, _ in ranked)
    _, node, dim = next(item for item in ranked if item[0] == best)
    return node, dim


def _dim_of_length(value: torch.Tensor, length: Size) -> int | None:
    """The dim of ``value`` that has the sequence's length; the second where several do."""
    if value.dim() == 0:
        return None
    preferred = [1, 0] if value.dim() == 2 else [1, *range(value.dim() - 2, 1, -1), 0]
    if value.dim() >= 4:
        preferred = [value.dim() - 2, *range(1, value.dim() - 2), value.dim() - 1]
    if value.dim() == 1:
        preferred = [0]
    for dim in preferred:
        if dim < value.dim() and same_size(value.shape[dim], length):
            return dim
    return None


def label_tangents(joint: JointGraph, axes: Axes) -> dict[Node, Streamed]:
    """Give each tangent the position of the forward output it belongs to.

    Tangents come in the order of the outputs that need a gradient; shapes tell which those are.
    """
    found: dict[Node, Streamed] = {}
    outputs = [node for node in joint.forward_outputs if isinstance(node, Node)]
    start = 0
    for tangent in joint.tangents:
        for index in range(start, len(outputs)):
            if dtype_and_shape(outputs[index]) == dtype_and_shape(tangent) is not None:
                at = axes.position(outputs[index])
                if at is not None:
                    found[tangent] = at
                start = index + 1
                break
    return found

"""Does a graph that is not streamed compute anything that would have been worth it?

Programs that break into several graphs have tiny ones: a scale, a buffer, a table of angles. What
stays whole in them costs nothing, and a warning about it would hide those that matter.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .dataflow import JointGraph, bytes_of, storage_of
from .inputs import SequenceAxis
from .placement import hint_of, value_of
from .rules.sizes import product

PER_TOKEN = 256
"""Elements for each token of the batch up to which a value is small: a table of rotary angles has
128, a hidden state of a model with long sequences thousands."""

LARGE_BYTES = 2**20
"""Bytes up to which a value is small in a graph that knows of no tokens."""


def computes_large_values(
    joint: JointGraph, axis: SequenceAxis | None, parameters: set[Node]
) -> bool:
    """Whether forward computes a large value that does not come from parameters alone."""
    from_parameters = set(parameters)
    for node in joint.order:
        if node.op != "call_function" or node in joint.dependent:
            continue
        if node.all_input_nodes and from_parameters.issuperset(node.all_input_nodes):
            from_parameters.add(node)
        elif storage_of(node) is node and _is_large(node, axis):
            return True
    return False


def _is_large(node: Node, axis: SequenceAxis | None) -> bool:
    if axis is None:
        return bytes_of(node) > LARGE_BYTES
    value = value_of(node)
    tokens = hint_of(axis.length) * axis.batch
    return isinstance(value, torch.Tensor) and hint_of(product(value.shape)) > PER_TOKEN * tokens

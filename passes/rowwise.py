"""Does each row of a value depend on one row of another?

A row is what all dims but the last select: a token. It is proven for chains of products with a
matrix and pointwise ops, which is what is between hidden states and a loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .dynamo_calls import argument_of, example_of, is_call, is_torch_function, value_of
from .frontier import Frontier, ops_of
from .rules.sizes import same_size

aten = torch.ops.aten


def is_rowwise(frontier: Frontier) -> bool:
    """Whether each row (all dims but the last) of the output depends on one row of the frontier.

    Proven for chains of products with a matrix and pointwise ops of torch that leave the shape up
    to the last dim as it is; ``False`` for everything else.
    """
    if len(frontier.nodes) != 1 or not isinstance(example_of(frontier.nodes[0]), Tensor):
        return False
    rows = example_of(frontier.nodes[0]).shape[:-1]
    activations = {frontier.nodes[0], *frontier.inside}
    return all(keeps_rows(node, rows, activations) for node in frontier.inside)


def keeps_rows(node: Node, rows: torch.Size, activations: set[Node]) -> bool:
    """Whether each row of ``node`` depends on one row of those inputs that are ``activations``.

    Their rows, and its own, must be ``rows``.
    """
    if not all(_has_rows(one, rows) for one in (node, *node.all_input_nodes) if one in activations):
        return False
    if not _has_rows(node, rows):
        return False
    if not isinstance(node.target, str) and not is_torch_function(node.target):
        return False  # others' functions may do anything
    if is_product_of(node, activations):
        return True
    ops = ops_of(node)
    others = [example_of(other) for other in node.all_input_nodes if other not in activations]
    # A tensor with at most one dim broadcasts along the last dim, the same for every row.
    return (
        ops is not None
        and all(map(_is_pointwise, ops))
        and all(not isinstance(other, Tensor) or other.ndim <= 1 for other in others)
    )


def _has_rows(node: Node, rows: torch.Size) -> bool:
    value = example_of(node)
    if not isinstance(value, Tensor) or value.ndim != len(rows) + 1:
        return False
    return all(map(same_size, value.shape[:-1], rows))


def _is_pointwise(op: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return op is aten._to_copy.default or torch.Tag.pointwise in op.tags


def is_product_of(node: Node, activations: set[Node]) -> bool:
    """Whether ``node`` multiplies the rows of one of ``activations`` with a matrix that is none."""
    if not is_call(node, "linear", "matmul", "mm") or "out" in node.kwargs:
        return False
    matrix = argument_of(node, 1, "weight" if is_call(node, "linear") else "other")
    bias = argument_of(node, 2, "bias")
    if argument_of(node, 0, "input") not in activations or {matrix, bias} & activations:
        return False
    return _dims(matrix) == 2 and (bias is None or _dims(bias) == 1)


def _dims(node: Any) -> int | None:
    value = value_of(node)
    return None if value is None else int(value.ndim)

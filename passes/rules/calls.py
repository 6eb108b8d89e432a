"""From a graph node to the `Call` that rules read."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import Node, map_arg

from .arguments import outputs_in, tensors_in
from .spec import Call

aten = torch.ops.aten
prims = torch.ops.prims

# Creation ops with their fill value, and those with the position of the argument that holds it.
_FILLS: dict[Any, int | float] = {
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}
_FILLS_BY_ARGUMENT: dict[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
# Ops that keep every element's value and at most move, repeat or cast it.
_KEEP_VALUES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.lift_fresh_copy.default,
        aten.permute.default,
        aten.repeat.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


def call_of(node: Node) -> Call:
    """The call that ``node`` makes, read from ``node.meta["val"]`` of it and its arguments.

    Raises:
        ValueError: the node or one of its arguments has no ``meta["val"]``.
    """

    def value(argument: Node) -> Any:
        if "val" not in argument.meta:
            raise ValueError(
                f"{argument.format_node()} has no meta['val']; run FakeTensorProp on the graph"
            )
        return argument.meta["val"]

    args = map_arg(node.args, value)
    kwargs = map_arg(node.kwargs, value)
    return Call(
        target=node.target,
        args=tuple(args),
        kwargs=dict(kwargs),
        tensors=tensors_in(args, kwargs),
        outputs=outputs_in(value(node)),
        constant=constant_tensors(node),
    )


def constant_fill(node: Node) -> float | None:
    """The number that every element of the node's value is known to equal, else ``None``."""
    while node.op == "call_function" and node.target in _KEEP_VALUES:
        source = node.args[0]
        if not isinstance(source, Node):
            return None
        node = source
    if node.op != "call_function":
        return None
    if node.target in _FILLS:
        return float(_FILLS[node.target])
    position = _FILLS_BY_ARGUMENT.get(node.target)
    if position is None:
        return None
    fill = node.args[position]
    # A SymInt or SymFloat fill is an fx node, or a Python object that must not be compared.
    return float(fill) if isinstance(fill, (bool, int, float)) else None


def constant_tensors(node: Node) -> dict[int, float]:
    """The tensors of a call that are filled with one constant, by their index in the call."""
    found: dict[int, float] = {}
    index = 0

    def visit(argument: Node) -> Node:
        nonlocal index
        if isinstance(argument.meta.get("val"), torch.Tensor):
            fill = constant_fill(argument)
            if fill is not None:
                found[index] = fill
            index += 1
        return argument

    map_arg((node.args, node.kwargs), visit)
    return found

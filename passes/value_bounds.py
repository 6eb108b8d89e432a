"""Between which numbers do the elements of a value lie, whatever the program's inputs are?

Given:  ``slopes = 1.0 / torch.pow(2, torch.arange(1, 9))``
        ``alibi = torch.arange(1 - s0, 1, dtype=int32).view(1, 1, s0) * slopes[:, None, None]``
Result: ``bounds_of(alibi)`` is within -2**30 and 2**30, since int32 holds no more

Interval arithmetic over Dynamo's graph, for biases that are computed from positions: such a bias
is far from the lowest number of a dtype. Values of floating-point inputs are not known, nor are
those of calls that are not listed here, and ones that are written in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .dynamo_calls import argument_of, is_call, name_of, value_of
from .writes import Writes

Bounds = tuple[float, float]

_SAME_ELEMENTS = (
    *("view", "reshape", "flatten", "expand", "expand_as", "broadcast_to", "repeat", "unsqueeze"),
    *("repeat_interleave", "squeeze", "transpose", "swapaxes", "permute", "contiguous", "clone"),
    *("getitem", "detach", "to", "float", "half", "bfloat16", "double", "type", "type_as"),
)
_JOINED = ("cat", "concat", "concatenate", "stack")
_BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda one, other: one + other,
    **dict.fromkeys(("sub", "subtract"), lambda one, other: one - other),
    **dict.fromkeys(("mul", "multiply"), lambda one, other: one * other),
    **dict.fromkeys(("div", "truediv", "true_divide", "divide"), lambda one, other: one / other),
    "pow": math.pow,
}


def bounds_of(node: Node, writes: Writes) -> Bounds | None:
    """The least and the greatest number that an element of ``node`` can be; ``None``: any."""
    found: dict[Node, Bounds | None] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        operands: list[Node] = []
        if _is_listed(current):
            map_arg(_operands(current), operands.append)
        missing = [one for one in operands if one not in found]
        if current in found or missing:
            pending.pop() if current in found else pending.extend(missing)
            continue
        found[current] = None if writes.writers(current) else _bounds(current, found)
        pending.pop()
    return found[node]


def _is_listed(node: Node) -> bool:
    return is_call(node, *_SAME_ELEMENTS, *_JOINED, *_BINARY, "neg")


def _operands(node: Node) -> Any:
    """The arguments whose elements those of a listed call are made of."""
    if is_call(node, *_BINARY):
        names = ("self", "exponent") if is_call(node, "pow") else ("input", "other")
        return [argument_of(node, position, name) for position, name in enumerate(names)]
    return argument_of(node, 0, "tensors" if is_call(node, *_JOINED) else "input")


def _bounds(node: Node, found: dict[Node, Bounds | None]) -> Bounds | None:
    value = value_of(node)
    if value is None or value.dtype.is_complex:
        return None
    bounds = _computed(node, found)
    if value.dtype.is_floating_point:
        largest = torch.finfo(value.dtype).max
        return bounds if bounds is not None and max(map(abs, bounds)) <= largest else None
    # Integers that overflow are other integers of the same dtype.
    info = (0, 1) if value.dtype == torch.bool else torch.iinfo(value.dtype)
    whole = info if isinstance(info, tuple) else (info.min, info.max)
    fits = bounds is not None and whole[0] <= bounds[0] and bounds[1] <= whole[1]
    return bounds if fits else (float(whole[0]), float(whole[1]))


def _computed(node: Node, found: dict[Node, Bounds | None]) -> Bounds | None:
    if is_call(node, "ones", "ones_like"):
        return (1.0, 1.0)
    if is_call(node, "zeros", "zeros_like"):
        return (0.0, 0.0)
    if is_call(node, "arange"):
        return _of_range(node)
    if not _is_listed(node) or "alpha" in node.kwargs or "rounding_mode" in node.kwargs:
        return None
    if is_call(node, *_BINARY) and len(node.args) > 2:  # add(one, alpha, other)
        return None
    if is_call(node, "view") and _reads_bits(node):
        return None
    operands = _operands(node)
    if is_call(node, *_JOINED):
        parts = (
            [_of(part, found) for part in operands] if isinstance(operands, list | tuple) else []
        )
        known = [part for part in parts if part is not None]
        if not parts or len(known) < len(parts):
            return None
        return min(part[0] for part in known), max(part[1] for part in known)
    if is_call(node, *_BINARY):
        return _combined(str(name_of(node)), *(_of(operand, found) for operand in operands))
    bounds = _of(operands, found)
    if bounds is not None and is_call(node, "neg"):
        return -bounds[1], -bounds[0]
    return bounds


def _reads_bits(view: Node) -> bool:
    """Whether a view takes the bits of its operand for numbers of another dtype."""
    value, given = value_of(view), value_of(_operands(view))
    return given is None or given.dtype != value.dtype


def _of(argument: Any, found: dict[Node, Bounds | None]) -> Bounds | None:
    if isinstance(argument, Node):
        return found.get(argument)
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return (float(argument), float(argument)) if math.isfinite(argument) else None
    return None


def _of_range(node: Node) -> Bounds | None:
    """Of ``arange(end)`` and ``arange(start, end)`` with numbers; steps stay between these."""
    numbers = [one for one in node.args if isinstance(one, int | float)]
    if not numbers or len(numbers) < len(node.args) or {"start", "end", "step"} & set(node.kwargs):
        return None
    ends = [0.0, float(numbers[0])] if len(numbers) == 1 else [float(one) for one in numbers[:2]]
    return min(ends), max(ends)


def _combined(name: str, one: Bounds | None, other: Bounds | None) -> Bounds | None:
    """Of a function that is monotonic in each operand where this is asked: at the corners."""
    if one is None or other is None:
        return None
    if name.endswith(("div", "divide")) and other[0] <= 0.0 <= other[1]:
        return None
    if name == "pow" and one[0] <= 0.0:
        return None
    try:
        corners = [_BINARY[name](left, right) for left, right in product(one, other)]
    except OverflowError:
        return None
    return (min(corners), max(corners)) if all(map(math.isfinite, corners)) else None

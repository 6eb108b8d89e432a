"""Reading attention scores that are written out: what lies between ``q @ k.T`` and the softmax.

Given:  ``s = q @ k.transpose(-2, -1) / 8; s = s + bias; s = s.masked_fill(mask, -inf)``
Result: q, k, ``scale = 1/8``, and the operations that make the bias, in order:
        ``Add(bias), Fill(mask, inverted=False, -inf)``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .attention_call import CannotNormalizeError
from .dynamo_calls import argument_of, is_call, value_of

CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous")
_LARGEST_FINITE_FILL = -1e4


@dataclass(frozen=True)
class Add:
    """``scores + factor * bias``."""

    bias: Node
    factor: float = 1.0


@dataclass(frozen=True)
class Multiply:
    """``scores * factor``."""

    factor: float


@dataclass(frozen=True)
class Fill:
    """``fill`` where ``mask`` is True, or False if ``keeps``; the scores elsewhere."""

    mask: Node
    keeps: bool
    fill: float


Step = Add | Multiply | Fill


@dataclass(frozen=True)
class Scores:
    """The product of queries and keys, and what is done to it before the softmax.

    ``product`` is the node of the product, ``steps`` are in the order of the program, ``chain``
    are all nodes from the product to the softmax's input.
    """

    product: Node
    steps: tuple[Step, ...]
    chain: tuple[Node, ...]


def scores_before(node: Any) -> Scores:
    """The scores that ``node`` holds.

    Raises:
        CannotNormalizeError: an operation on the way has no place in the op, or a value on the
            way is used elsewhere as well.
    """
    steps: list[Step] = []
    chain: list[Node] = []
    while isinstance(node, Node):
        chain.append(node)
        if is_call(node, "matmul", "bmm", "einsum"):
            _check_private(chain)
            return Scores(node, tuple(reversed(steps)), tuple(chain))
        if is_call(node, "baddbmm"):
            base, beta, alpha = (
                node.args[0],
                constant(argument_of(node, 3, "beta", 1)),
                constant(argument_of(node, 4, "alpha", 1)),
            )
            if beta is None or alpha is None or not isinstance(base, Node):
                raise CannotNormalizeError(f"the factors of {node} are not constants")
            if beta != 0.0:
                steps.append(Add(base, beta))
            steps.append(Multiply(alpha))
            _check_private(chain)
            return Scores(node, tuple(reversed(steps)), tuple(chain))
        found = _step(node)
        if found is None:
            raise CannotNormalizeError(f"the scores come from {node}, which is no product")
        node, step = found
        if step is not None:
            steps.append(step)
    raise CannotNormalizeError(f"the scores come from {node}, which is no tensor")


def _check_private(chain: list[Node]) -> None:
    for node in chain:
        if len(node.users) != 1:
            raise CannotNormalizeError(f"the attention scores {node} are used elsewhere as well")


def _step(node: Node) -> tuple[Any, Step | None] | None:
    """The scores that ``node`` is made of, and what it does to them."""
    if is_call(node, *CASTS):
        return node.args[0], None
    if is_call(node, "mul", "imul", "multiply"):
        for scores, other in (node.args[:2], node.args[1::-1]):
            factor = constant(other)
            if factor is not None:
                return scores, Multiply(factor)
    if (
        is_call(node, "div", "truediv", "itruediv", "true_divide")
        and "rounding_mode" not in node.kwargs
    ):
        divisor = constant(node.args[1])
        if divisor:
            return node.args[0], Multiply(1.0 / divisor)
    if is_call(node, "add", "iadd") and "alpha" not in node.kwargs:
        return _added(*node.args[:2])
    if is_call(node, "masked_fill"):
        fill = constant(argument_of(node, 2, "value"))
        mask = argument_of(node, 1, "mask")
        if fill is not None and isinstance(mask, Node):
            return node.args[0], Fill(mask, keeps=False, fill=fill)
    if is_call(node, "where"):
        return _chosen(node)
    return None


def _added(left: Any, right: Any) -> tuple[Any, Step] | None:
    """Of two summands, the scores are the one that is computed by a product."""
    for scores, bias in ((left, right), (right, left)):
        if isinstance(bias, Node) and isinstance(scores, Node) and _is_product_like(scores):
            return scores, Add(bias)
    return None


def _is_product_like(node: Any) -> bool:
    while isinstance(node, Node):
        if is_call(node, "matmul", "bmm", "einsum", "baddbmm"):
            return True
        found = _step(node)
        if found is None:
            return False
        node = found[0]
    return False


def _chosen(node: Node) -> tuple[Any, Step] | None:
    mask = argument_of(node, 0, "condition")
    one, other = argument_of(node, 1, "input"), argument_of(node, 2, "other")
    if not isinstance(mask, Node) or value_of(mask) is None:
        return None
    if (fill := constant(other)) is not None:
        return one, Fill(mask, keeps=True, fill=fill)
    if (fill := constant(one)) is not None:
        return other, Fill(mask, keeps=False, fill=fill)
    return None


def constant(argument: Any) -> float | None:
    """The number that ``argument`` is, or that a tensor without dims is made of."""
    if isinstance(argument, bool):
        return None
    if isinstance(argument, int | float):
        return float(argument)
    if is_call(argument, *CASTS):
        return constant(argument.args[0])
    if is_call(argument, "tensor", "scalar_tensor"):
        return constant(argument.args[0])
    if is_call(argument, "full") and tuple(argument_of(argument, 0, "size")) == ():
        return constant(argument_of(argument, 1, "fill_value"))
    return None


def holds_mask(bias: Node) -> bool:
    """Whether some number as low as a fill goes into ``bias``: then it masks, as a fill does."""
    seen, stack = set(), [bias]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        numbers = [one for one in (*node.args, *node.kwargs.values()) if isinstance(one, float)]
        if any(number <= _LARGEST_FINITE_FILL for number in numbers):
            return True
        stack.extend(node.all_input_nodes)
    return False


def check_fill(fill: float) -> None:
    """
    Raises:
        CannotNormalizeError: a filled key would keep some weight, which an additive bias would
            not reproduce.
    """
    if fill > _LARGEST_FINITE_FILL:
        raise CannotNormalizeError(f"scores are filled with {fill}, which is no mask")

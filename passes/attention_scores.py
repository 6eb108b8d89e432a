"""Reading attention scores that are written out: what lies between ``q @ k.T`` and the softmax.

Given:  ``s = q @ k.transpose(-2, -1) / 8; s = s + bias; s = s.masked_fill(mask, -inf)``
Result: q, k, and what is done to the scores, in order:
        ``Multiply(1/8), Add(bias), Fill(mask, keeps=False, -inf)``

The list of what may be done is closed (`_step`): any other call on the way, one with an argument
that is not read here, or a number that is not known when it is read, is no step.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .attention_call import CannotNormalizeError, tensor_of
from .dynamo_calls import argument_of, arguments_of, is_call, times_read, value_of
from .mask_values import rounded
from .rules.sizes import same_shape
from .writes import Writes

PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone")


@dataclass(frozen=True)
class Add:
    """``scores + factor * bias``; ``node`` is the call that reads the bias."""

    node: Node
    bias: Node
    factor: float = 1.0


@dataclass(frozen=True)
class Multiply:
    """``scores * factor``."""

    factor: float


@dataclass(frozen=True)
class Fill:
    """``fill`` where ``mask`` is True, or False if ``keeps``; the scores elsewhere.

    ``node`` is the call that reads the mask.
    """

    node: Node
    mask: Node
    keeps: bool
    fill: float


Step = Add | Multiply | Fill


@dataclass(frozen=True)
class Scores:
    """The product of queries and keys, and what is done to it before the softmax.

    ``product`` is the node of the product, ``steps`` are in the order of the program, ``chain``
    are all nodes from the softmax's input back to the product.
    """

    product: Node
    steps: tuple[Step, ...]
    chain: tuple[Node, ...]


def scores_of_products(graph: Graph, writes: Writes) -> set[Node]:
    """The nodes that are products, or made of one by steps: of two summands, these are scores."""
    found: set[Node] = set()
    for node in graph.nodes:
        if is_call(node, *PRODUCTS) or _step(node, found, writes) is not None:
            found.add(node)
    return found


def scores_before(node: Any, products: Set[Node], writes: Writes) -> Scores:
    """The scores that ``node`` holds; ``products`` are the graph's `scores_of_products`.

    Raises:
        CannotNormalizeError: an operation on the way has no place in the op, or a value on the
            way is used elsewhere as well.
    """
    steps: list[Step] = []
    chain: list[Node] = []
    while isinstance(node, Node):
        if times_read(node) != 1:
            raise CannotNormalizeError(f"the attention scores {node} are used elsewhere as well")
        chain.append(node)
        if is_call(node, *PRODUCTS):
            steps += _steps_of_product(node)
            _check_values(node, chain)
            return Scores(node, tuple(reversed(steps)), tuple(chain))
        found = _step(node, products, writes)
        if found is None:
            obstacle = _obstacle(node, writes)
            raise CannotNormalizeError(f"the scores come from {obstacle}, which is no product")
        node, step = found
        if step is not None:
            steps.append(step)
    raise CannotNormalizeError(f"the scores come from {node}, which is no tensor")


def _obstacle(node: Node, writes: Writes) -> Node:
    """The first call from ``node`` backwards that is no step, whatever its operands are."""
    while True:
        found = _step(node, set(node.all_input_nodes), writes)
        if found is None:
            return node
        node, _ = found


def _steps_of_product(node: Node) -> list[Step]:
    """What ``baddbmm`` does to the product, last first."""
    if not is_call(node, "baddbmm"):
        return []
    beta, alpha = number(argument_of(node, 3, "beta", 1)), number(argument_of(node, 4, "alpha", 1))
    base = argument_of(node, 0, "input")
    if beta is None or alpha is None or not isinstance(base, Node):
        raise CannotNormalizeError(f"the factors of {node} are not constants")
    added: list[Step] = [] if beta == 0.0 else [Add(node, base, beta)]
    return [*added, Multiply(alpha)]


def _check_values(product: Node, chain: list[Node]) -> None:
    """
    Raises:
        CannotNormalizeError: some value on the way has another shape, or does not hold what
            the product does.
    """
    for node in chain:
        check_holds(node, tensor_of(product).dtype)
        if not same_shape(tensor_of(node).shape, tensor_of(product).shape):
            raise CannotNormalizeError(f"the scores are broadcast by {node}")


def check_holds(node: Node, dtype: torch.dtype) -> None:
    """
    Raises:
        CannotNormalizeError: ``node`` does not hold every number of ``dtype``: a cast rounds.
    """
    own = tensor_of(node).dtype
    if own != dtype and (own not in _FLOATS or torch.promote_types(own, dtype) != own):
        raise CannotNormalizeError(f"{node} rounds {dtype} to {own}")


def _step(node: Node, products: Set[Node], writes: Writes) -> tuple[Node, Step | None] | None:
    """The scores that ``node`` is made of, and what it does to them."""
    if is_call(node, *CASTS):
        scores = argument_of(node, 0, "input")
        return (scores, None) if scores in products and _same_device(node, scores) else None
    if is_call(node, "mul", "imul", "multiply"):
        return _scaled(node, products, writes)
    if is_call(node, "div", "truediv", "itruediv", "true_divide", "divide"):
        scores, divisor = arguments_of(node, "input", "other") or (None, None)
        value = constant(divisor, node, writes)
        return (scores, Multiply(1.0 / value)) if value and scores in products else None
    if is_call(node, "add", "iadd"):
        return _added(node, products)
    if is_call(node, "masked_fill"):
        scores, mask, fill = arguments_of(node, "input", "mask", "value") or (None, None, None)
        value = constant(fill, node, writes)
        if value is not None and isinstance(mask, Node) and scores in products:
            return scores, Fill(node, mask, keeps=False, fill=value)
    if is_call(node, "where"):
        return _chosen(node, products, writes)
    return None


def _same_device(one: Node, other: Node) -> bool:
    values = value_of(one), value_of(other)
    return None not in values and values[0].device == values[1].device


def _scaled(node: Node, products: Set[Node], writes: Writes) -> tuple[Node, Step | None] | None:
    left, right = arguments_of(node, "input", "other") or (None, None)
    for scores, other in ((left, right), (right, left)):
        factor = constant(other, node, writes)
        if factor is not None and scores in products:
            return scores, Multiply(factor)
    return None


def _added(node: Node, products: Set[Node]) -> tuple[Node, Step] | None:
    """Of two summands, the scores are the one that is made of a product."""
    left, right = arguments_of(node, "input", "other") or (None, None)
    for scores, bias in ((left, right), (right, left)):
        if isinstance(bias, Node) and value_of(bias) is not None and scores in products:
            return scores, Add(node, bias)
    return None


def _chosen(node: Node, products: Set[Node], writes: Writes) -> tuple[Node, Step] | None:
    names = ("condition", "input", "other")
    if node.op == "call_method":
        names = ("input", "condition", "other")
    found = dict(zip(names, arguments_of(node, *names) or (None,) * 3, strict=True))
    mask, one, other = found["condition"], found["input"], found["other"]
    if not isinstance(mask, Node) or value_of(mask) is None:
        return None
    if one in products and (fill := constant(other, node, writes)) is not None:
        return one, Fill(node, mask, keeps=True, fill=fill)
    if other in products and (fill := constant(one, node, writes)) is not None:
        return other, Fill(node, mask, keeps=False, fill=fill)
    return None


def number(argument: Any) -> float | None:
    """``argument`` if it is a number."""
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        return None
    return float(argument)


def constant(argument: Any, reader: Node, writes: Writes) -> float | None:
    """The number that ``argument`` is, or a tensor without dims when ``reader`` reads it."""
    dtypes: list[torch.dtype] = []
    while isinstance(argument, Node):
        value = value_of(argument)
        if value is None or value.dim() != 0 or value.requires_grad:
            return None
        if writes.between(argument, argument, reader) is not None:
            return None
        dtypes.append(value.dtype)
        if is_call(argument, *CASTS):
            argument = argument.args[0]
        elif is_call(argument, "tensor", "scalar_tensor"):
            argument = argument_of(argument, 0, "data" if is_call(argument, "tensor") else "s")
        elif is_call(argument, "full"):  # of no dims, as its value is
            argument = argument_of(argument, 1, "fill_value")
        else:
            return None
    result = number(argument)
    for dtype in reversed(dtypes):
        if result is None or not dtype.is_floating_point:
            return None
        result = rounded(result, dtype)
    return result


def check_fill(step: Fill) -> bool:
    """Whether the filled scores are ``-inf``; else they are the lowest number of their dtype.

    Raises:
        CannotNormalizeError: scores may be as low as the fill, or so near to it that what is
            filled keeps some weight.
    """
    dtype = tensor_of(step.node).dtype
    fill = rounded(step.fill, dtype)
    if fill == -math.inf:
        return True
    if dtype == torch.float16 or fill != torch.finfo(dtype).min:
        raise CannotNormalizeError(
            f"scores are filled with {step.fill}, which is no mask: scores may be as low"
        )
    return False

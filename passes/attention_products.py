"""The two products of written-out attention, as operands in SDPA's order of dims.

``q @ k.transpose(-2, -1)`` and ``torch.einsum("bqhd,bkhd->bhqk", q, k)`` both are of a query
``[..., L, E]`` and a key ``[..., S, E]``; the product of weights and values is read alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from .attention_call import CannotNormalizeError, tensor_of
from .dynamo_calls import argument_of, arguments_of, is_call
from .dynamo_emit import Emitter


def query_and_key(emit: Emitter, product: Node) -> tuple[Node, Node]:
    """``([..., L, E], [..., S, E])`` of the product that makes the scores ``[..., L, S]``.

    Raises:
        CannotNormalizeError: the product is not of two positional operands, or it is an einsum
            of another form.
    """
    if not is_call(product, "einsum"):
        left, right = _factors(product)
        return left, _transposed(emit, right)
    (query, key), (query_term, key_term), result = _einsum(product)
    *batch, row, column = list(result)
    if row in key_term:
        query, key, query_term, key_term = key, query, key_term, query_term
    (size, *more) = [letter for letter in query_term if letter not in result]
    if more or row not in query_term or column not in key_term:
        raise CannotNormalizeError(f"{product.args[0]} is no product of queries and keys")
    return (
        _permuted(emit, query, query_term, [*batch, row, size]),
        _permuted(emit, key, key_term, [*batch, column, size]),
    )


def value_operand(emit: Emitter, output: Node, weights: Node) -> tuple[Node, list[int] | None]:
    """``[..., S, Ev]`` of the product of weights ``[..., L, S]`` and values.

    Also returns the permutation from ``[..., L, Ev]`` to the dims of ``output``, ``None`` if they
    are in this order.

    Raises:
        CannotNormalizeError: the weights are not the left operand of a matrix product, or it is
            an einsum of another form.
    """
    if not is_call(output, "einsum"):
        left, right = _factors(output)
        if left is not weights or is_call(output, "baddbmm"):
            raise CannotNormalizeError("the attention weights are not the left operand")
        return right, None
    (left, right), (weights_term, value_term), result = _einsum(output)
    if left is not weights:
        right, weights_term, value_term = left, value_term, weights_term
    *batch, row, column = list(weights_term)
    sizes = [letter for letter in value_term if letter not in weights_term]
    natural = [*batch, row, *sizes]
    if len(sizes) != 1 or column in result or sorted(natural) != sorted(result):
        raise CannotNormalizeError(f"{output.args[0]} is no product of weights and values")
    value = _permuted(emit, right, value_term, [*batch, column, *sizes])
    return value, [natural.index(letter) for letter in result]


def _factors(product: Node) -> tuple[Node, Node]:
    """The two operands of a matrix product, in every form that takes nothing else."""
    names = ("input", "mat2" if is_call(product, "bmm") else "other")
    if is_call(product, "baddbmm"):
        found = arguments_of(product, "input", "batch1", "batch2", "beta", "alpha")
        return _two(product, (found or ())[1:3])
    return _two(product, arguments_of(product, *names) or ())


def _two(product: Node, operands: Sequence[Any]) -> tuple[Node, Node]:
    if len(operands) == 2 and all(isinstance(operand, Node) for operand in operands):
        return operands[0], operands[1]
    raise CannotNormalizeError(f"{product} has not two operands and no other argument")


def _transposed(emit: Emitter, node: Node) -> Node:
    """``node.transpose(-2, -1)``, which takes back the one that ``node`` may be."""
    last = {-2, -1}
    rank = tensor_of(node).dim()
    if is_call(node, "transpose", "swapaxes"):
        dims = {argument_of(node, 1, "dim0"), argument_of(node, 2, "dim1")}
        if {dim - rank if dim >= 0 else dim for dim in dims if isinstance(dim, int)} == last:
            return node.args[0]  # type: ignore[return-value]
    return emit.method("transpose", node, -2, -1)


def _einsum(node: Node) -> tuple[tuple[Node, Node], tuple[str, str], str]:
    """Operands, their terms, and the result's term."""
    if node.kwargs or len(node.args) < 2:
        raise CannotNormalizeError(f"the operands of {node} are not positional")
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise CannotNormalizeError(f"einsum of the form {equation}")
    terms, result = equation.replace(" ", "").split("->")
    one, _, other = terms.partition(",")
    if any(len(set(term)) != len(term) for term in (one, other, result)):
        raise CannotNormalizeError(f"einsum of the form {equation}")
    return _two(node, operands), (one, other), result


def _permuted(emit: Emitter, node: Node, term: str, order: Sequence[str]) -> Node:
    if sorted(term) != sorted(order):
        raise CannotNormalizeError(f"{term} has not the dims {order}")
    if list(term) == list(order):
        return node
    return emit.method("permute", node, *(term.index(letter) for letter in order))

"""Handlers of integer and floating-point arithmetic.

Operands are first converted to the dtype of the result, then joined case by case. What is not
followed exactly (data, rounding, a possible wrap-around) becomes the op applied to its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .mask_algebra import (
    Linear,
    conjunction,
    floor_divide,
)
from .mask_handlers import (
    Index,
    Table,
    arguments,
    as_cases,
    as_formulas,
    dtype_of,
    handles,
)
from .mask_values import (
    Number,
    Real,
    Value,
    applied,
    assumptions,
    combined,
    constant_assuming,
    constant_value,
    data_names,
    fits,
)

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

aten = torch.ops.aten
prims = torch.ops.prims
HANDLERS: Table = {}


def _sum_of(left: Number, right: Number, sign: int, dtype: torch.dtype) -> Number | None:
    """``left + sign * right`` in ``dtype``; None where it may round, wrap or be NaN."""
    values = constant_value(left), constant_value(right)
    if values[0] is not None and values[1] is not None:
        assuming = assumptions(left) | assumptions(right)
        return constant_assuming(values[0] + sign * values[1], dtype, assuming)
    if values[1] == 0 and not assumptions(right):
        return left
    if sign == 1 and values[0] == 0 and not assumptions(left):
        return right
    if isinstance(left, Linear) and isinstance(right, Linear):
        if not (left.is_integer and right.is_integer):
            return None
        total_linear = left + right * sign
        return total_linear if fits(total_linear, dtype) else None
    infinite, other = (left, right) if isinstance(left, Real) else (right, left)
    if isinstance(infinite, Real) and infinite.value == -math.inf and sign == 1:
        return Real(-math.inf, infinite.assuming | data_names(other))
    return None


def product_of(left: Number, right: Number, dtype: torch.dtype) -> Number | None:
    """``left * right`` in ``dtype``; None where it may round, wrap or be NaN."""
    if constant_value(right) is None:
        left, right = right, left
    value, factor = constant_value(left), constant_value(right)
    if factor is None:
        return None
    if value is not None:
        assuming = assumptions(left) | assumptions(right)
        if 0 in (value, factor) and not (math.isfinite(value) and math.isfinite(factor)):
            return Real(math.nan, assuming)
        return constant_assuming(value * factor, dtype, assuming)
    if factor == 1 and not assumptions(right):
        return left
    if factor == 0:
        names = data_names(left) | assumptions(right) if dtype.is_floating_point else frozenset()
        return constant_assuming(0, dtype, names)
    if isinstance(left, Linear) and isinstance(right, Linear) and left.is_integer:
        product = left * right.const
        return product if fits(product, dtype) else None
    return None


def _arithmetic(
    interp: Interpreter,
    node: Node,
    index: Index,
    operands: Sequence[Any],
    compute: Callable[..., Number | None],
) -> Value | None:
    dtype = dtype_of(node)
    cases = [as_cases(interp, node, index, operand, dtype) for operand in operands]
    known = [case for case in cases if case is not None]
    if len(known) < len(cases):
        return None
    kind = (node.target, tuple(sorted(node.kwargs.items())))

    def joined(numbers: tuple[Number, ...]) -> Number:
        result = compute(*numbers)
        return result if result is not None else _applied(kind, numbers, dtype)

    return combined(joined, known)


def _applied(kind: Hashable, numbers: Sequence[Number], dtype: torch.dtype) -> Linear:
    return applied(kind, numbers, [dtype] * len(numbers), dtype)


@handles(HANDLERS, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
def _add(interp: Interpreter, node: Node, index: Index) -> Value | None:
    dtype, alpha, operands = dtype_of(node), node.kwargs.get("alpha", 1), arguments(node)[:2]
    sign = -1 if node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1
    if alpha != 1 or dtype == torch.bool:
        return None
    return _arithmetic(interp, node, index, operands, lambda a, b: _sum_of(a, b, sign, dtype))


@handles(HANDLERS, aten.rsub.Scalar, aten.rsub.Tensor)
def _reverse_subtract(interp: Interpreter, node: Node, index: Index) -> Value | None:
    dtype = dtype_of(node)
    if len(arguments(node)) > 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    return _arithmetic(interp, node, index, arguments(node), lambda a, b: _sum_of(b, a, -1, dtype))


@handles(HANDLERS, aten.mul.Tensor, aten.mul.Scalar)
def _multiply(interp: Interpreter, node: Node, index: Index) -> Value | None:
    dtype = dtype_of(node)
    if dtype == torch.bool:
        formulas = as_formulas(interp, node, index)
        return None if formulas is None else conjunction(formulas)
    return _arithmetic(interp, node, index, arguments(node), lambda a, b: product_of(a, b, dtype))


@handles(HANDLERS, aten.neg.default)
def _negate(interp: Interpreter, node: Node, index: Index) -> Value | None:
    dtype = dtype_of(node)
    minus_one = Linear.of(-1)
    return _arithmetic(
        interp, node, index, arguments(node), lambda a: product_of(a, minus_one, dtype)
    )


def _divided(interp: Interpreter, dividend: Number, divisor: Number, mode: str) -> Linear | None:
    if not (isinstance(dividend, Linear) and isinstance(divisor, Linear)):
        return None
    if not dividend.is_integer or not divisor.is_constant or divisor.const <= 0:
        return None
    if mode == "trunc" and not interp.never_negative(dividend):
        return None
    return floor_divide(dividend, divisor.const)


@handles(HANDLERS, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default)
def _divide(interp: Interpreter, node: Node, index: Index) -> Value | None:
    mode = node.kwargs.get("rounding_mode", "floor")
    if dtype_of(node).is_floating_point or not isinstance(mode, str):
        return None
    return _arithmetic(
        interp, node, index, arguments(node)[:2], lambda a, b: _divided(interp, a, b, mode)
    )


@handles(HANDLERS, aten.remainder.Scalar, aten.remainder.Tensor)
def _remainder(interp: Interpreter, node: Node, index: Index) -> Value | None:
    def compute(dividend: Number, divisor: Number) -> Number | None:
        quotient = _divided(interp, dividend, divisor, "floor")
        if quotient is None or not isinstance(dividend, Linear):
            return None
        return dividend - quotient * int(constant_value(divisor) or 0)

    if dtype_of(node).is_floating_point:
        return None
    return _arithmetic(interp, node, index, arguments(node), compute)

"""Handlers of comparisons, logic, selection and conversion, and of any other pointwise op."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .mask_algebra import (
    FALSE,
    TRUE,
    Formula,
    Linear,
    at_least_zero,
    conjunction,
    disjunction,
    equal,
    negation,
)
from .mask_arithmetic import product_of
from .mask_handlers import (
    Index,
    Table,
    arguments,
    as_cases,
    as_formula,
    as_formulas,
    as_value,
    dtype_of,
    handles,
    is_tensor,
    op_of,
    read,
)
from .mask_values import (
    Cases,
    Number,
    Value,
    always,
    applied,
    assumptions,
    by_condition,
    combined,
    constant_value,
    decided,
    rounded,
    selected,
    truth,
)

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

aten = torch.ops.aten
prims = torch.ops.prims
HANDLERS: Table = {}


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")
}


def _compared(name: str, numbers: tuple[Number, ...], dtype: torch.dtype) -> Formula:
    left, right = numbers
    values = constant_value(left), constant_value(right)
    assuming = assumptions(left) | assumptions(right)
    if values[0] is not None and values[1] is not None and not assuming:
        return TRUE if _COMPARISONS[name](values[0], values[1]) else FALSE
    if isinstance(left, Linear) and isinstance(right, Linear):
        if left.is_integer and right.is_integer:
            return _linear_comparison(name, left, right)
    return truth(applied(name, (left, right), (dtype, dtype), torch.bool))


def _linear_comparison(name: str, left: Linear, right: Linear) -> Formula:
    if name in ("eq", "ne"):
        same = equal(left, right)
        return same if name == "eq" else negation(same)
    if name in ("lt", "le"):
        left, right, name = right, left, {"lt": "gt", "le": "ge"}[name]
    return at_least_zero(left - right - (1 if name == "gt" else 0))


@handles(
    HANDLERS,
    *(getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Tensor", "Scalar")),
)
def _compare(interp: Interpreter, node: Node, index: Index) -> Value | None:
    name = op_of(node)._schema.name.removeprefix("aten::")
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in arguments(node)]
    dtype = torch.result_type(*values)
    if dtype == torch.bool:
        left, right = (as_formula(interp, node, index, operand) for operand in arguments(node))
        if left is None or right is None or name not in ("eq", "ne"):
            return None
        return _same_truth(left, right) if name == "eq" else negation(_same_truth(left, right))
    if any(isinstance(value, float) and rounded(value, dtype) != value for value in values):
        return None  # whether the op compares before or after rounding is the device's choice
    cases = [as_cases(interp, node, index, operand, dtype) for operand in arguments(node)]
    known = [case for case in cases if case is not None]
    if len(known) < len(cases):
        return None
    return decided(lambda numbers: _compared(name, numbers, dtype), known)


def _same_truth(left: Formula, right: Formula) -> Formula:
    both = conjunction([left, right])
    return disjunction([both, conjunction([negation(left), negation(right)])])


@handles(HANDLERS, aten.logical_and.default, aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)
def _both(interp: Interpreter, node: Node, index: Index) -> Value | None:
    formulas = as_formulas(interp, node, index)
    return None if formulas is None else conjunction(formulas)


@handles(HANDLERS, aten.logical_or.default, aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
def _either(interp: Interpreter, node: Node, index: Index) -> Value | None:
    formulas = as_formulas(interp, node, index)
    return None if formulas is None else disjunction(formulas)


@handles(HANDLERS, aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)
def _exactly_one(interp: Interpreter, node: Node, index: Index) -> Value | None:
    formulas = as_formulas(interp, node, index)
    return None if formulas is None else negation(_same_truth(*formulas))


@handles(HANDLERS, aten.logical_not.default, aten.bitwise_not.default)
def _not(interp: Interpreter, node: Node, index: Index) -> Value | None:
    formulas = as_formulas(interp, node, index)
    return None if formulas is None else negation(formulas[0])


@handles(
    HANDLERS,
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
)
def _where(interp: Interpreter, node: Node, index: Index) -> Value | None:
    condition, then, otherwise = arguments(node)
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        condition, then, otherwise = then, otherwise, condition
    chosen = as_formula(interp, node, index, condition)
    if chosen == TRUE or chosen == FALSE:
        return as_value(interp, node, index, then if chosen == TRUE else otherwise)
    values = [as_value(interp, node, index, operand) for operand in (then, otherwise)]
    if chosen is None or values[0] is None or values[1] is None:
        return None
    return selected(chosen, values[0], values[1])


def _ordered(left: Cases, right: Cases) -> Formula | None:
    """The condition ``left <= right``, for integers only: NaN is neither smaller nor larger."""
    numbers = [number for cases in (left, right) for _, number in cases]
    if not all(isinstance(number, Linear) and number.is_integer for number in numbers):
        return None
    return decided(lambda pair: _compared("le", pair, torch.int64), [left, right])


def _smaller(left: Cases | None, right: Cases | None, take_larger: bool) -> Cases | None:
    if left is None or right is None:
        return None
    ordered = _ordered(left, right)
    if ordered is None:
        return None
    chosen = selected(ordered, right, left) if take_larger else selected(ordered, left, right)
    return chosen if isinstance(chosen, tuple) else None


@handles(
    HANDLERS,
    aten.minimum.default,
    aten.maximum.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)
def _extremum(interp: Interpreter, node: Node, index: Index) -> Value | None:
    cases = [as_cases(interp, node, index, operand, dtype_of(node)) for operand in arguments(node)]
    larger = node.target in (aten.maximum.default, aten.clamp_min.default)
    return _smaller(cases[0], cases[1], larger)


@handles(HANDLERS, aten.clamp.default)
def _clamp(interp: Interpreter, node: Node, index: Index) -> Value | None:
    low, high = (*arguments(node), None, None)[1:3]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    result = as_cases(interp, node, index, arguments(node)[0], dtype_of(node))
    for bound, is_low in ((low, True), (high, False)):
        if bound is not None:
            other = as_cases(interp, node, index, bound, dtype_of(node))
            result = _smaller(result, other, is_low)
    return result


@handles(HANDLERS, aten.abs.default)
def _absolute(interp: Interpreter, node: Node, index: Index) -> Value | None:
    dtype, zero = dtype_of(node), always(Linear.of(0))
    value = as_cases(interp, node, index, arguments(node)[0], dtype)
    if value is None:
        return None
    minus = combined(lambda numbers: product_of(numbers[0], Linear.of(-1), dtype), [value])
    ordered = _ordered(zero, value)
    return None if minus is None or ordered is None else selected(ordered, value, minus)


@handles(HANDLERS, prims.convert_element_type.default, aten._to_copy.default)
def _convert_element_type(interp: Interpreter, node: Node, index: Index) -> Value | None:
    return as_value(interp, node, index, arguments(node)[0])


def unknown_pointwise(interp: Interpreter, node: Node, index: Index) -> Value | None:
    """Any other pointwise op: equal arguments give equal results."""
    if torch.Tag.nondeterministic_seeded in op_of(node).tags or node.kwargs:
        return None
    dtypes: list[torch.dtype] = []
    cases: list[Cases] = []
    literals: list[Any] = []
    for operand in arguments(node):
        if not is_tensor(operand):
            if isinstance(operand, Node | list | tuple):
                return None
            literals.append(operand)
            continue
        value = read(interp, node, index, operand)
        if value is not None and not isinstance(value, tuple):
            value = by_condition(value, torch.int64)
        if value is None:
            return None
        literals.append(torch.Tensor)
        cases.append(value)
        dtypes.append(operand.meta["val"].dtype)
    kind = (node.target, tuple((type(item), item) for item in literals))
    dtype = dtype_of(node)
    if dtype == torch.bool:
        return decided(lambda numbers: truth(applied(kind, numbers, dtypes, dtype)), cases)
    return combined(lambda numbers: applied(kind, numbers, dtypes, dtype), cases)

"""What the handlers of the mask interpreter share: their table's type, and reading operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .mask_algebra import FALSE, TRUE, Formula, Linear, negation
from .mask_values import (
    Cases,
    Number,
    Value,
    always,
    applied,
    as_condition,
    by_condition,
    combined,
    constant,
    converted,
    fits,
)

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

Index = tuple[Linear, ...]
"""The position of one element: one expression for each dim of its tensor."""

Handler = Callable[["Interpreter", Node, Index], Value | None]
"""``handler(interpreter, node, index)`` is the node's element at ``index``; None if unknown."""

Table = dict[Any, Handler]


def handles(table: Table, *targets: Any) -> Callable[[Handler], Handler]:
    """Enter the decorated handler into ``table`` for each op overload in ``targets``."""

    def register(handler: Handler) -> Handler:
        table.update(dict.fromkeys(targets, handler))
        return handler

    return register


def arguments(node: Node) -> tuple[Any, ...]:
    """The call's positional arguments, whose types the op's schema fixes."""
    return node.args


def op_of(node: Node) -> Any:
    """The called op overload."""
    return node.target


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of the call, given by position or by name."""
    if len(arguments(node)) > position:
        return arguments(node)[position]
    return node.kwargs.get(name, default)


def constant_element(value: Any, dtype: torch.dtype) -> Value | None:
    """A number in the graph's code as an element of a tensor of ``dtype``."""
    if not isinstance(value, bool | int | float):
        return None
    if dtype == torch.bool:
        return TRUE if value else negation(TRUE)
    number = constant(value, dtype)
    return None if number is None else always(number)


def read(interp: Interpreter, node: Node, index: Index, operand: Any) -> Value | None:
    """The element of a tensor operand that ``node`` reads for its element at ``index``."""
    place = interp.broadcast(operand, node, index)
    return None if place is None else interp.value(operand, place)


def is_tensor(operand: Any) -> bool:
    return isinstance(operand, Node) and isinstance(operand.meta.get("val"), torch.Tensor)


def as_cases(
    interp: Interpreter, node: Node, index: Index, operand: Any, dtype: torch.dtype
) -> Cases | None:
    """An operand (tensor, symbolic integer or number) converted to ``dtype``."""
    if is_tensor(operand):
        value = read(interp, node, index, operand)
        return None if value is None else _convert(value, operand.meta["val"].dtype, dtype)
    number: Number | None
    if isinstance(operand, bool | int | float):
        number = constant(operand, dtype)
    elif isinstance(operand, Node) and isinstance(operand.meta.get("val"), int | torch.SymInt):
        number = interp.size(operand)
        number = number if fits(number, dtype) else None
    else:
        number = None
    return None if number is None else always(number)


def _convert(value: Value, source: torch.dtype, target: torch.dtype) -> Cases | None:
    if not isinstance(value, tuple):
        return by_condition(value, target)

    def convert(numbers: tuple[Number, ...]) -> Number:
        exact = converted(numbers[0], target)
        return exact if exact is not None else applied("convert", numbers, [source], target)

    return value if source == target else combined(convert, [value])


def as_formula(interp: Interpreter, node: Node, index: Index, operand: Any) -> Formula | None:
    """An operand converted to bool."""
    if not is_tensor(operand):
        return (TRUE if operand else FALSE) if isinstance(operand, bool | int | float) else None
    value = read(interp, node, index, operand)
    return None if value is None else as_condition(value, operand.meta["val"].dtype)


def as_formulas(interp: Interpreter, node: Node, index: Index) -> list[Formula] | None:
    """The operands as conditions, where the op is logical on them."""
    if dtype_of(node) != torch.bool:
        return None
    formulas = [as_formula(interp, node, index, operand) for operand in arguments(node)]
    known = [formula for formula in formulas if formula is not None]
    return known if len(known) == len(formulas) else None


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def as_value(interp: Interpreter, node: Node, index: Index, operand: Any) -> Value | None:
    """An operand converted to the dtype of the result."""
    if dtype_of(node) == torch.bool:
        return as_formula(interp, node, index, operand)
    return as_cases(interp, node, index, operand, dtype_of(node))

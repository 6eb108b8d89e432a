"""What is known of one element of a mask: a condition, or a number by cases.

A boolean element is a `Formula`. Any other element is a tuple of cases ``(guard, number)``: the
guards exclude each other and one of them holds. A number is a `Linear` (an integer, whatever the
dtype, as long as the dtype holds it exactly) or a `Real` (any other floating-point constant).

Arithmetic is followed only where the tensor's dtype can not round or wrap. Everything else is
`applied`: the op itself, on these arguments, is an atom. Two elements made by the same op from
the same arguments are then known to be equal, and nothing more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from .mask_algebra import (
    TRUE,
    Atom,
    Formula,
    Linear,
    at_least_zero,
    conjunction,
    disjunction,
    equal,
    negation,
    unsatisfiable,
)

MOST_CASES = 8


@dataclass(frozen=True)
class Real:
    """A floating-point constant that is not a small integer.

    ``assuming`` names the data that must not be +inf or NaN for this to be the value: ``-inf``
    added to data is ``-inf`` only then.
    """

    value: float
    assuming: frozenset[str] = frozenset()


Number = Linear | Real
Cases = tuple[tuple[Formula, Number], ...]
Value = Formula | Cases


def constant(value: bool | int | float, dtype: torch.dtype) -> Number | None:
    """The number that ``value`` becomes in ``dtype``; None where it wraps or is truncated."""
    if dtype.is_floating_point:
        if isinstance(value, int) and abs(value) > 2**53:
            return None
        result = rounded(float(value), dtype)
        if math.isfinite(result) and result.is_integer() and abs(result) <= exact_limit(dtype):
            return Linear.of(int(result))
        return Real(result)
    if dtype.is_complex or dtype == torch.bool or int_or_none(value) is None:
        return None
    result_int = Linear.of(int(value))
    return result_int if fits(result_int, dtype) else None


def constant_assuming(
    value: int | float, dtype: torch.dtype, assuming: frozenset[str]
) -> Number | None:
    """`constant`, where the value rests on assumptions about data."""
    number = constant(value, dtype)
    if not assuming or number is None:
        return number
    return Real(number.value if isinstance(number, Real) else float(number.const), assuming)


def int_or_none(value: bool | int | float) -> int | None:
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value)


def exact_limit(dtype: torch.dtype) -> int:
    """Integers up to this magnitude are exact in the floating-point ``dtype``."""
    return 2 ** (1 - round(math.log2(torch.finfo(dtype).eps)))


def rounded(value: float, dtype: torch.dtype) -> float:
    """``value`` rounded to ``dtype``, ties to even, without making a tensor.

    (A pass may run where fake tensor modes are active, and a tensor made there has no value.)
    """
    if not math.isfinite(value) or value == 0.0 or dtype == torch.float64:
        return value
    info = torch.finfo(dtype)
    if abs(value) >= 2 * info.max:
        return math.copysign(math.inf, value)
    digits = 1 - round(math.log2(info.eps))
    smallest = math.frexp(info.smallest_normal)[1] - digits
    exponent = max(math.frexp(value)[1] - digits, smallest)
    result = math.ldexp(round(math.ldexp(value, -exponent)), exponent)
    return math.copysign(math.inf, value) if abs(result) > info.max else result


def fits(number: Linear, dtype: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` holds the integer exactly, whatever its atoms' values."""
    if dtype == torch.bool or dtype.is_complex:
        return False
    atom = number.lone_atom
    if atom is not None and atom.dtype is not None and _widens(atom.dtype, dtype):
        return True
    if not number.is_integer:
        return False
    bounds = number.bounds()
    if bounds is None:
        return False
    if dtype.is_floating_point:
        return max(abs(bounds[0]), abs(bounds[1])) <= exact_limit(dtype)
    info = torch.iinfo(dtype)
    return info.min <= bounds[0] and bounds[1] <= info.max


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    if source == target:
        return True
    if (
        source == torch.bool
        or source.is_complex
        or source.is_floating_point != (target.is_floating_point)
    ):
        return False
    if source.is_floating_point:
        return torch.promote_types(source, target) == target
    narrow, wide = torch.iinfo(source), torch.iinfo(target)
    return wide.min <= narrow.min and narrow.max <= wide.max


def converted(number: Number, dtype: torch.dtype) -> Number | None:
    """The number as it is after a conversion to ``dtype``; None where that is not followed."""
    if isinstance(number, Real):
        if not dtype.is_floating_point:
            return None
        return constant_assuming(number.value, dtype, number.assuming)
    if fits(number, dtype):
        return number
    return constant(number.const, dtype) if number.is_constant else None


def constant_value(number: Number) -> float | int | None:
    if isinstance(number, Real):
        return number.value
    return number.const if number.is_constant else None


def always(number: Number) -> Cases:
    return ((TRUE, number),)


def assumptions(number: Number) -> frozenset[str]:
    return number.assuming if isinstance(number, Real) else frozenset()


def by_condition(condition: Formula, dtype: torch.dtype) -> Cases | None:
    """A boolean element converted to 0 and 1."""
    one, zero = constant(1, dtype), constant(0, dtype)
    if one is None or zero is None:
        return None
    return pruned([(condition, one), (negation(condition), zero)])


def pruned(cases: Sequence[tuple[Formula, Number]]) -> Cases | None:
    """The cases without those that never apply, equal numbers merged; None where too many."""
    merged: dict[Number, list[Formula]] = {}
    for guard, number in cases:
        merged.setdefault(number, []).append(guard)
    if len(merged) == 1:
        return always(cases[0][1])
    kept = [
        (guard, number)
        for number, guards in merged.items()
        if not unsatisfiable(guard := disjunction(guards))
    ]
    if len(kept) == 1:
        return always(kept[0][1])
    return tuple(kept) if 0 < len(kept) <= MOST_CASES else None


def combined(
    compute: Callable[[tuple[Number, ...]], Number | None], operands: Sequence[Cases]
) -> Cases | None:
    """``compute`` on every combination of the operands' cases; None where one is not followed."""
    if math.prod(len(cases) for cases in operands) > 4 * MOST_CASES:
        return None
    result = []
    for choice in itertools.product(*operands):
        guard = conjunction([case[0] for case in choice])
        if len(operands) > 1 and unsatisfiable(guard):
            continue
        number = compute(tuple(case[1] for case in choice))
        if number is None:
            return None
        result.append((guard, number))
    return pruned(result) if result else None


def decided(
    decide: Callable[[tuple[Number, ...]], Formula], operands: Sequence[Cases]
) -> Formula | None:
    """The condition that ``decide`` gives, over every combination of the operands' cases."""
    if math.prod(len(cases) for cases in operands) > 4 * MOST_CASES:
        return None
    parts = []
    for choice in itertools.product(*operands):
        guard = conjunction([case[0] for case in choice])
        if not unsatisfiable(guard):
            parts.append(conjunction([guard, decide(tuple(case[1] for case in choice))]))
    return disjunction(parts)


def applied(
    op: Hashable, numbers: Sequence[Number], dtypes: Sequence[torch.dtype], dtype: torch.dtype
) -> Linear:
    """The result of ``op`` on the numbers as an atom; its truth, 0 or 1, where boolean."""
    key = ("applied", op, tuple(numbers), tuple(dtypes), dtype)
    if dtype == torch.bool:
        return Linear.of(Atom(key, low=0, high=Linear.of(1), dtype=dtype))
    return Linear.of(Atom(key, dtype=dtype))


def truth(atom: Linear) -> Formula:
    """The condition that a boolean atom is true."""
    return at_least_zero(atom - 1)


def nonzero(number: Number, dtype: torch.dtype) -> Formula:
    """The condition that a number converts to ``True`` (a NaN does)."""
    if isinstance(number, Real):
        if not number.assuming:
            return TRUE if number.value != 0 else negation(TRUE)
    elif number.is_integer:
        return negation(equal(number, Linear.of(0)))
    return truth(applied("nonzero", (number,), (dtype,), torch.bool))


def as_condition(value: Value, dtype: torch.dtype) -> Formula | None:
    """Any element converted to bool."""
    if not isinstance(value, tuple):
        return value
    return decided(lambda numbers: nonzero(numbers[0], dtype), [value])


def selected(condition: Formula, then: Value, otherwise: Value) -> Value | None:
    """``where(condition, then, otherwise)`` for two elements of one kind."""
    refused = negation(condition)
    if isinstance(then, tuple) and isinstance(otherwise, tuple):
        return pruned(
            [(conjunction([condition, guard]), number) for guard, number in then]
            + [(conjunction([refused, guard]), number) for guard, number in otherwise]
        )
    if isinstance(then, tuple) or isinstance(otherwise, tuple):
        return None
    return disjunction([conjunction([condition, then]), conjunction([refused, otherwise])])


def data_names(number: Number) -> frozenset[str]:
    """Names of the graph's nodes whose elements the number depends on."""
    if isinstance(number, Real):
        return frozenset()
    names: set[str] = set()
    for atom in number.terms:
        kind, *details = atom.key if isinstance(atom.key, tuple) else (None,)
        if kind == "element":
            names.add(details[0].name)
        elif kind == "applied":
            names.update(*(data_names(argument) for argument in details[1]))
        elif atom.quotient is not None:
            names |= data_names(atom.quotient[0])
    return frozenset(names)

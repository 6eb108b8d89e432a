"""Integer linear conditions over mask coordinates, and a prover that only ever errs to "unknown".

Glossary
--------
atom
    An integer that is not computed further: a coordinate of the mask, a symbolic size, or one
    element of a tensor whose values are data. Atoms with equal keys are the same integer.
linear
    ``a*x + b*y + ... + c`` over atoms, with integer coefficients.
formula
    ``And`` and ``Or`` of conditions ``linear >= 0``. There is no ``Not``: over the integers,
    ``not (e >= 0)`` is ``-e - 1 >= 0``. A boolean element ``p`` of unknown value is an atom in
    {0, 1}, and its truth is ``p - 1 >= 0``.

The one question asked of a formula is `unsatisfiable`. True is a proof; False means that no proof
was found. Everything that bounds the work therefore answers False.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

EXTENT = 2**30
"""Positions and sizes without a known upper bound are taken to be below this, in the check that
integer arithmetic does not wrap around. (A mask of 2**30 rows has 2**60 elements.)"""

_MOST_BRANCHES = 400
_MOST_CONSTRAINTS = 120


class Atom:
    """An unknown integer, equal to every other atom of the same ``key``.

    ``low`` and ``high`` are inclusive bounds that always hold, ``dtype`` is that of the tensor
    whose element it is (None for coordinates, sizes and quotients). An atom whose dtype is not an
    integer's stands for a value that no integer reasoning may be applied to.
    """

    __slots__ = ("_hash", "dtype", "high", "key", "low", "quotient")

    def __init__(
        self,
        key: Hashable,
        *,
        low: int | None = None,
        high: Linear | None = None,
        dtype: torch.dtype | None = None,
        quotient: tuple[Linear, int] | None = None,
    ) -> None:
        self.key, self.low, self.high, self.dtype = key, low, high, dtype
        self.quotient = quotient
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Atom) and self._hash == other._hash and self.key == other.key
        )

    def __repr__(self) -> str:
        return str(self.key)

    @property
    def is_integer(self) -> bool:
        return self.dtype is None or not (self.dtype.is_floating_point or self.dtype.is_complex)

    def conditions(self) -> Iterator[Linear]:
        """Linear expressions that are never negative, whatever the atom's value."""
        own = Linear.of(self)
        if self.low is not None:
            yield own - self.low
        if self.high is not None:
            yield self.high - own
        if self.quotient is not None:
            dividend, divisor = self.quotient
            yield dividend - own * divisor
            yield own * divisor + (divisor - 1) - dividend


class Linear:
    """``sum(coefficient * atom) + const``; immutable."""

    __slots__ = ("_hash", "const", "terms")

    def __init__(self, terms: Mapping[Atom, int], const: int) -> None:
        self.terms = {atom: factor for atom, factor in terms.items() if factor}
        self.const = const
        self._hash = hash((frozenset(self.terms.items()), const))

    @staticmethod
    def of(value: Atom | int) -> Linear:
        return Linear({value: 1}, 0) if isinstance(value, Atom) else Linear({}, value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Linear)
            and self._hash == other._hash
            and self.const == other.const
            and self.terms == other.terms
        )

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.const + other)
        terms = dict(self.terms)
        for atom, factor in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor
        return Linear(terms, self.const + other.const)

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Linear | int) -> Linear:
        return self + (-other)

    def __mul__(self, factor: int) -> Linear:
        return Linear({atom: c * factor for atom, c in self.terms.items()}, self.const * factor)

    def __repr__(self) -> str:
        parts = [f"{factor}*{atom}" for atom, factor in self.terms.items()]
        return " + ".join([*parts, str(self.const)])

    @property
    def is_constant(self) -> bool:
        return not self.terms

    @property
    def lone_atom(self) -> Atom | None:
        """The atom, where the expression is nothing but one."""
        if self.const == 0 and len(self.terms) == 1:
            ((atom, factor),) = self.terms.items()
            return atom if factor == 1 else None
        return None

    @property
    def is_integer(self) -> bool:
        return all(atom.is_integer for atom in self.terms)

    def is_value(self, constant: int) -> bool:
        return not self.terms and self.const == constant

    def bounds(self) -> tuple[int, int] | None:
        """Constant inclusive bounds, or None where an atom has none."""
        low = high = self.const
        for atom, factor in self.terms.items():
            span = _atom_bounds(atom)
            if span is None:
                return None
            ends = (span[0] * factor, span[1] * factor)
            low, high = low + min(ends), high + max(ends)
        return low, high


def _atom_bounds(atom: Atom) -> tuple[int, int] | None:
    if atom.quotient is not None:
        dividend, divisor = atom.quotient
        span = dividend.bounds()
        return span and (span[0] // divisor, span[1] // divisor)
    if atom.low is None:
        return None
    if atom.high is not None:
        span = atom.high.bounds()
        return span and (atom.low, span[1])
    return (atom.low, EXTENT) if atom.dtype is None else None


def floor_divide(dividend: Linear, divisor: int) -> Linear:
    """``dividend // divisor`` for a positive ``divisor``."""
    whole = {a: c // divisor for a, c in dividend.terms.items() if c % divisor == 0}
    rest_terms = {a: c for a, c in dividend.terms.items() if c % divisor}
    quotient, remainder = divmod(dividend.const, divisor)
    rest = Linear(rest_terms, remainder)
    span = rest.bounds()
    if span is not None and span[0] // divisor == span[1] // divisor and not _assumed(rest):
        return Linear(whole, quotient + span[0] // divisor)
    atom = Atom(("floor", rest, divisor), quotient=(rest, divisor))
    return Linear(whole, quotient) + Linear.of(atom)


def _assumed(expression: Linear) -> bool:
    """Whether `Linear.bounds` rests on `EXTENT`, which is good for wrap-around checks alone."""
    return any(
        (atom.quotient is not None and _assumed(atom.quotient[0]))
        or (atom.quotient is None and (atom.high is None or _assumed(atom.high)))
        for atom in expression.terms
    )


@dataclass(frozen=True)
class AtLeastZero:
    """The condition ``expression >= 0``."""

    expression: Linear


@dataclass(frozen=True)
class And:
    parts: frozenset[Formula]


@dataclass(frozen=True)
class Or:
    parts: frozenset[Formula]


Formula = AtLeastZero | And | Or
TRUE = And(frozenset())
FALSE = Or(frozenset())


def at_least_zero(expression: Linear) -> Formula:
    if expression.is_constant:
        return TRUE if expression.const >= 0 else FALSE
    return AtLeastZero(_tightened(expression))


def equal(left: Linear, right: Linear) -> Formula:
    return conjunction([at_least_zero(left - right), at_least_zero(right - left)])


def conjunction(parts: Iterable[Formula]) -> Formula:
    flat: set[Formula] = set()
    for part in parts:
        if part == FALSE:
            return FALSE
        flat.update(part.parts if isinstance(part, And) else (part,))
    return next(iter(flat)) if len(flat) == 1 else And(frozenset(flat))


def disjunction(parts: Iterable[Formula]) -> Formula:
    flat: set[Formula] = set()
    for part in parts:
        if part == TRUE:
            return TRUE
        flat.update(part.parts if isinstance(part, Or) else (part,))
    return next(iter(flat)) if len(flat) == 1 else Or(frozenset(flat))


def negation(formula: Formula) -> Formula:
    if isinstance(formula, AtLeastZero):
        return at_least_zero(-formula.expression - 1)
    combine = disjunction if isinstance(formula, And) else conjunction
    return combine([negation(part) for part in formula.parts])


def conditions(formula: Formula) -> Iterator[Linear]:
    """The expressions of all conditions in the formula."""
    if isinstance(formula, AtLeastZero):
        yield formula.expression
    else:
        for part in formula.parts:
            yield from conditions(part)


def unsatisfiable(*formulas: Formula) -> bool:
    """Whether it is proven that no integers satisfy all ``formulas`` together."""
    # Each branch is facts, choices that are left, and formulas that were not looked at yet.
    branches: list[tuple[list[Linear], list[Or], list[Formula]]] = [([], [], list(formulas))]
    for _ in range(_MOST_BRANCHES):
        facts, choices, added = branches.pop()
        facts, choices = list(facts), list(choices)
        while added:
            part = added.pop()
            if isinstance(part, And):
                added.extend(part.parts)
            elif isinstance(part, Or):
                choices.append(part)
            else:
                facts.append(part.expression)
        if not infeasible(facts):
            if not choices:
                return False
            choices.sort(key=lambda choice: len(choice.parts))
            first, rest = choices[0], choices[1:]
            branches += [(facts, rest, [part]) for part in reversed(list(first.parts))]
        if not branches:
            return True
    return False


def implies(premise: Formula, conclusion: Formula) -> bool:
    """Whether it is proven that ``conclusion`` holds wherever ``premise`` does."""
    return unsatisfiable(premise, negation(conclusion))


def infeasible(expressions: Iterable[Linear]) -> bool:
    """Whether it is proven that the expressions are not all ``>= 0`` for any integers.

    Fourier-Motzkin elimination over the rationals, with the constant of each inequality rounded
    down to what integers can reach. The atoms' own bounds take part.
    """
    system: dict[frozenset[tuple[Atom, int]], Linear] = {}
    pending = list(expressions)
    known: set[Atom] = set()
    while pending:
        expression = pending.pop()
        if not _keep_strictest(system, expression):
            return True
        for atom in expression.terms:
            if atom not in known:
                known.add(atom)
                pending.extend(atom.conditions())
    while system:
        atom = _cheapest_atom(system.values())
        above = [e for e in system.values() if e.terms.get(atom, 0) > 0]
        below = [e for e in system.values() if e.terms.get(atom, 0) < 0]
        system = {key: e for key, e in system.items() if atom not in e.terms}
        if len(system) + len(above) * len(below) > _MOST_CONSTRAINTS:
            return False
        for low in above:
            for high in below:
                combined = low * -high.terms[atom] + high * low.terms[atom]
                if not _keep_strictest(system, combined):
                    return True
    return False


def _keep_strictest(system: dict[frozenset[tuple[Atom, int]], Linear], expression: Linear) -> bool:
    """Add an inequality to the system; False where it can not hold."""
    if expression.is_constant:
        return expression.const >= 0
    expression = _tightened(expression)
    key = frozenset(expression.terms.items())
    if key not in system or expression.const < system[key].const:
        system[key] = expression
    return True


def _cheapest_atom(expressions: Iterable[Linear]) -> Atom:
    counts: dict[Atom, list[int]] = {}
    for expression in expressions:
        for atom, factor in expression.terms.items():
            counts.setdefault(atom, [0, 0])[factor > 0] += 1
    return min(counts, key=lambda atom: counts[atom][0] * counts[atom][1])


def _tightened(expression: Linear) -> Linear:
    divisor = math.gcd(*expression.terms.values())
    if divisor == 1:
        return expression
    terms = {atom: factor // divisor for atom, factor in expression.terms.items()}
    return Linear(terms, expression.const // divisor)

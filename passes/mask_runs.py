"""Running sums: documents packed into one row, told apart by breaks in their positions.

A model that is given positions ``P`` of packed documents numbers the documents by

    C = cumsum(P[j] - P[j - 1] != 1)

and allows key k for query q where ``C[q] == C[k]`` and ``P[k] <= P[q]``. That this is causal takes
a lemma: between two places of equal ``C`` there is no break, so ``P`` grows by one at each step,
and ``P[k] - P[q] == k - q``. (Positions are taken not to cross the largest int64 within a run.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from .mask_algebra import (
    Atom,
    Formula,
    Linear,
    at_least_zero,
    conditions,
    disjunction,
    equal,
    implies,
    negation,
)
from .mask_handlers import Index, Table, argument, arguments, dtype_of, handles
from .mask_values import Value, always, by_condition, fits

if TYPE_CHECKING:
    from .mask_interpreter import Interpreter

aten = torch.ops.aten

HANDLERS: Table = {}


@dataclass(frozen=True)
class Run:
    """One element of a running count of breaks, of which the others are known by `others`.

    ``place`` is its index along the summed dim, and ``value`` the element, at the same place, of
    the tensor that steps by one wherever no break is counted.
    """

    others: tuple[Node, int, Index]
    place: Linear
    value: Atom


@handles(HANDLERS, aten.cumsum.default)
def _cumsum(interp: Interpreter, node: Node, index: Index) -> Value | None:
    """A running sum of one constant is affine; a running count of breaks is noted as a `Run`."""
    source, dim, dtype = arguments(node)[0], argument(node, 1, "dim"), dtype_of(node)
    if not index:
        return None
    dim %= len(index)
    step = Atom(("summed", node), low=0, high=interp.sizes(source)[dim] - 1)
    summed = interp.value(source, (*index[:dim], Linear.of(step), *index[dim + 1 :]))
    cases = summed if isinstance(summed, tuple) else by_condition(summed, dtype)
    if cases is not None and len(cases) == 1:
        each = cases[0][1]
        if not isinstance(each, Linear) or not each.is_constant:
            return None
        total = (index[dim] + 1) * each.const
        return always(total) if fits(total, dtype) else None
    if not isinstance(summed, tuple):
        return _counted(interp, node, dim, index, summed, step)
    return None


def _counted(
    interp: Interpreter, node: Node, dim: int, index: Index, breaks: Formula, step: Atom
) -> Value | None:
    """The count as an atom, noted as a `Run` where something steps by one between breaks."""
    count = Atom(("element", node, index), dtype=dtype_of(node))
    for difference in _atoms(conditions(breaks)):
        value = _stepping(difference, step, index[dim])
        inside = at_least_zero(Linear.of(step) - 1)
        unbroken = equal(Linear.of(difference), Linear.of(1))
        if value is not None and implies(inside, disjunction([breaks, unbroken])):
            others = (node, dim, (*index[:dim], *index[dim + 1 :]))
            interp.runs[count] = Run(others, index[dim], value)
            break
    return always(Linear.of(count))


def _stepping(difference: Atom, step: Atom, place: Linear) -> Atom | None:
    """Where ``difference`` is ``x[step] - x[step - 1]``: the element ``x[place]``."""
    match difference.key:
        case ("applied", (aten.sub.Tensor, ()), (Linear() as now, Linear() as before), *_):
            pass
        case _:
            return None
    current, previous = now.lone_atom, before.lone_atom
    if current is None or previous is None:
        return None
    match current.key, previous.key:
        case ("element", Node() as tensor, tuple() as at), (
            "element",
            Node() as other,
            tuple() as was,
        ):
            if tensor is not other or Linear.of(step) not in at:
                return None
            dim = at.index(Linear.of(step))
            expected = (*at[:dim], Linear.of(step) - 1, *at[dim + 1 :])
            if was != expected or any(step in i.terms for d, i in enumerate(at) if d != dim):
                return None
            return Atom(
                ("element", tensor, (*at[:dim], place, *at[dim + 1 :])), dtype=current.dtype
            )
    return None


def consequences(formula: Formula, interp: Interpreter) -> Iterator[Formula]:
    """What holds, besides the formula, of the running counts that it compares."""
    runs = [
        (atom, interp.runs[atom]) for atom in _atoms(conditions(formula)) if atom in interp.runs
    ]
    for (count, run), (other_count, other) in itertools.permutations(runs, 2):
        if run.others == other.others:
            same = equal(Linear.of(count), Linear.of(other_count))
            ahead = at_least_zero(other.place - run.place)
            steps = equal(Linear.of(other.value) - Linear.of(run.value), other.place - run.place)
            yield disjunction([negation(same), negation(ahead), steps])


def _atoms(expressions: Iterable[Linear]) -> list[Atom]:
    return list(dict.fromkeys(atom for expression in expressions for atom in expression.terms))

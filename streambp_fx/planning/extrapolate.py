"""Carry what is known at a few layers and lengths to the whole model and to any length.

Layers. A program with ``L`` equal layers does the same things in each. The bytes alive at one of
them in layer ``i`` of backward are affine in ``i`` and ``L``: so many layers hold what they saved,
so many have given their gradients. Over ``i``, they are therefore highest in the first layer or the
last. These are found by counting moments from the start of backward and from its end, in two
programs with one repetition of layers more and less; their difference is what one more brings.

Lengths. A step that runs op by op has terms of ``T`` and, where a mask is built, of ``T^2``: three
lengths give each moment exactly. A streamed step has terms of ``T`` only, but a chunk's workspace
is the larger of several such: between lengths that are known, the line through them is never too
low.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .timelines import Instant, PlanningError, Terms, Timeline

Amounts = dict[str, float]
Interpolation = Callable[[Sequence[float], Sequence[float], float], float]
"""``interpolation(points, values, x)``: the value at ``x``."""

LAYERS = "{} of all layers"
REST = "other {}"
"""What the parts of a term are called that do and do not grow with the number of layers."""


@dataclass(frozen=True)
class Curve:
    """Bytes by term, at each moment that may be the peak, at each of some lengths.

    moments
        For each moment, its terms at each of ``lengths``.
    """

    lengths: tuple[int, ...]
    moments: tuple[tuple[Amounts, ...], ...]
    interpolation: Interpolation

    def peak(self, tokens: int) -> float:
        """The most bytes that are alive in a step of ``tokens`` in each row."""
        return max(self.interpolation(self.lengths, sums, tokens) for sums in self._sums)

    @cached_property
    def _sums(self) -> set[tuple[float, ...]]:
        """Bytes of the moments at each length; most are equal to another's."""
        return {tuple(sum(terms.values()) for terms in moment) for moment in self.moments}

    def terms(self, tokens: int) -> Amounts:
        """The terms at the peak of a step of ``tokens``."""
        candidates = []
        for moment in self.moments:
            names = dict.fromkeys(name for terms in moment for name in terms)
            candidates.append(
                {
                    name: self.interpolation(
                        self.lengths, [terms.get(name, 0.0) for terms in moment], tokens
                    )
                    for name in names
                }
            )
        return max(candidates, key=lambda terms: sum(terms.values()))


def to_layers(
    timelines: Mapping[int, Timeline], layers: int, split: frozenset[str] = frozenset()
) -> list[Amounts]:
    """The terms at the moments of a program of ``layers`` layers that may be its peak.

    Args:
        timelines: by number of layers; two, or one of ``layers`` itself.
        layers: of the whole model.
        split: terms to tell apart into what grows with the layers and what does not.

    Raises:
        PlanningError: the two programs do not repeat one sequence of ops.
    """
    if len(timelines) == 1:
        (only,) = timelines.values()
        return [dict(instant.terms) for instant in (*only.forward, *only.backward)]
    (few, short), (more, long) = sorted(timelines.items())
    pairs = [*_paired(short.forward, long.forward), *_paired(short.backward, long.backward)]
    return [_carried(one, other, few, more, layers, split) for one, other in pairs]


def _paired(short: Sequence[Instant], long: Sequence[Instant]) -> Iterator[tuple[Terms, Terms]]:
    """Moments of two programs, the first half counted from the start, the rest from the end."""
    half = (len(short) + 1) // 2
    rest = len(short) - half
    pairs = [
        *zip(short[:half], long[:half], strict=True),
        *zip(short[half:], long[len(long) - rest :], strict=True),
    ]
    for one, other in pairs:
        if one.kind != other.kind:
            raise PlanningError(
                "the model's layers are not alike, so that a few can not stand for all: where "
                f"{one.kind} runs with fewer layers, {other.kind} does with more"
            )
        yield one.terms, other.terms


def _carried(
    short: Terms, long: Terms, few: int, more: int, layers: int, split: frozenset[str]
) -> Amounts:
    carried: Amounts = {}
    for name in dict.fromkeys((*short, *long)):
        known = short.get(name, 0)
        each = (long.get(name, 0) - known) / (more - few)
        if name in split:
            carried[LAYERS.format(name)] = each * layers
            carried[REST.format(name)] = known - each * few
        else:
            carried[name] = known + each * (layers - few)
    return carried


def quadratic(points: Sequence[float], values: Sequence[float], x: float) -> float:
    """The polynomial through all points (Lagrange)."""
    total = 0.0
    for point, value in zip(points, values, strict=True):
        weight = value
        for other in points:
            if other != point:
                weight *= (x - other) / (point - other)
        total += weight
    return total


def piecewise_linear(points: Sequence[float], values: Sequence[float], x: float) -> float:
    """The lines between neighbours; outside of the points, the first and the last of them."""
    segments = list(pairwise(zip(points, values, strict=True)))
    (left, low), (right, high) = next(
        (segment for segment in segments if x <= segment[1][0]), segments[-1]
    )
    return low + (high - low) * (x - left) / (right - left)

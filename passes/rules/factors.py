"""The dim factors that a reshape keeps: ``[B, T, d] <-> [B*T, d]`` for any B.

Given
    two shapes with the same number of elements, read in row-major order
Result
    letters for both such that every dim is the row-major product of its letters

The walk goes from the innermost dims outwards. Where the innermost remaining input size divides
the output's (or the reverse), the quotient stays for the next step; equal sizes share a letter.
Where neither divides the other (``[2, 3] -> [3, 2]``) the positions are mixed: what remains of
those dims, out to the next place where the products agree, gets letters of its own, all `whole`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .letters import Letters
from .sizes import exact_quotient, product, same_size
from .spec import Dims, Letter, Size


def reshape_letters(
    letters: Letters, before: Sequence[Size], after: Sequence[Size]
) -> tuple[Dims, Dims, frozenset[Letter]] | None:
    """``(input dims, output dims, whole letters)`` of a reshape.

    Returns ``None`` for tensors without elements, which have no factors.
    """
    if any(same_size(size, 0) for size in (*before, *after)):
        return None
    left, right = _Side(before), _Side(after)
    whole: set[Letter] = set()
    count = 0
    while left.skip_ones() and right.skip_ones():
        smaller = _smaller(left.rest, right.rest)
        if smaller is not None:
            shared = letters.one(f"f{count}", smaller)
            left.take(shared, smaller)
            right.take(shared, smaller)
            count += 1
            continue
        spans = _next_agreement(left, right)
        if spans is None:
            return None
        for side, name, span in ((left, "in", spans[0]), (right, "out", spans[1])):
            for _ in range(span):
                mixed = letters.one(f"{name}{side.index}", side.rest)
                side.take(mixed, side.rest)
                whole.update(mixed)
    if left.skip_ones() or right.skip_ones():
        return None
    return left.dims(), right.dims(), frozenset(whole)


class _Side:
    """One shape during the walk: the dim it is at and what remains of that dim's size."""

    def __init__(self, shape: Sequence[Size]) -> None:
        self.shape = tuple(shape)
        self.index = len(shape) - 1
        self.rest: Size = shape[-1] if shape else 1
        self.found: list[list[Letter]] = [[] for _ in shape]

    def skip_ones(self) -> bool:
        """Go outwards past used-up dims; whether any is left."""
        while self.index >= 0 and same_size(self.rest, 1):
            self.index -= 1
            self.rest = self.shape[self.index] if self.index >= 0 else 1
        return self.index >= 0

    def take(self, letter: tuple[Letter, ...], size: Size) -> None:
        """Give the dim another letter, outside those it has."""
        self.found[self.index][:0] = letter
        rest = exact_quotient(self.rest, size)
        # `size` divides `rest`: it was chosen so, or is `rest` itself.
        self.rest = 1 if rest is None else rest
        self.skip_ones()

    def remaining(self) -> list[Size]:
        """The sizes still to be lettered, innermost first."""
        return [self.rest, *reversed(self.shape[: self.index])]

    def dims(self) -> Dims:
        return tuple(tuple(letters) for letters in self.found)


def _smaller(a: Size, b: Size) -> Size | None:
    """Whichever of the sizes divides the other, if either does."""
    if exact_quotient(b, a) is not None:
        return a
    if exact_quotient(a, b) is not None:
        return b
    return None


def _next_agreement(left: _Side, right: _Side) -> tuple[int, int] | None:
    """How many remaining dims of each side until their products agree, fewest first."""
    ours, theirs = left.remaining(), right.remaining()
    pairs = [(i, j) for i in range(1, len(ours) + 1) for j in range(1, len(theirs) + 1)]
    for i, j in sorted(pairs, key=sum):
        if same_size(product(ours[:i]), product(theirs[:j])):
            return i, j
    return None

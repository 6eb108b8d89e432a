"""Giving letters to dims: what the rules of all families are written with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .sizes import same_size
from .spec import Dims, Letter, Size


class Letters:
    """Hands out letters for one `Spec` and remembers their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[Letter, Size] = {}

    def one(self, name: str, size: Size) -> tuple[Letter, ...]:
        """A new letter of ``size``, or none for size 1, which has nothing to be split into."""
        if same_size(size, 1):
            return ()
        letter = name
        # Names are read by people; only a clash needs a number.
        while letter in self.sizes:
            letter += "'"
        self.sizes[letter] = size
        return (letter,)

    def each(self, name: str, shape: Iterable[Size]) -> Dims:
        """New letters ``name0, name1, ...``, one for each dim of ``shape``."""
        return tuple(self.one(f"{name}{dim}", size) for dim, size in enumerate(shape))


def letters_in(*dims: Dims | None) -> frozenset[Letter]:
    """Every letter that appears in ``dims``."""
    return frozenset(letter for one in dims for letters in one or () for letter in letters)


def align_right(shape: Sequence[Size], target: Sequence[Size], dims: Dims) -> Dims | None:
    """The letters of a tensor that broadcasts against ``target``, whose letters are ``dims``.

    A dim of size 1 repeats its one position and carries no letter. Returns ``None`` if a dim is
    neither 1 nor provably the target's size.
    """
    if len(shape) > len(target):
        return None
    offset = len(target) - len(shape)
    aligned: list[tuple[Letter, ...]] = []
    for index, size in enumerate(shape):
        if same_size(size, target[offset + index]):
            aligned.append(dims[offset + index])
        elif same_size(size, 1):
            aligned.append(())
        else:
            return None
    return tuple(aligned)


def shape_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """The shape as a tuple of ints and SymInts."""
    return tuple(tensor.shape)


def wrap_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the left; a tensor without dims is indexed as if it had one."""
    return dim % max(ndim, 1)


def wrap_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims counted from the left; ``None`` and ``[]`` mean all of them, as in reductions."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return tuple(range(ndim))
    return tuple(wrap_dim(dim, ndim) for dim in dims)

"""How an op relates the dims of its inputs and outputs, written like an einops expression.

Glossary
--------
letter
    A name for an index that runs over one (factor of a) tensor dim. ``b t d -> (b t) d`` has the
    letters ``b``, ``t`` and ``d``; the output's first dim is the product of ``b`` and ``t``.
local
    A chunk of the letter in the outputs needs only the same chunk of the letter in the inputs.
whole
    The op mixes positions along the letter (``softmax`` over it, ``cumsum``, ``flip``), or nothing
    is known about it. Such a letter can not be streamed through this op.
sum
    The letter is in the inputs alone and the op adds over it, so that the op's result is the sum
    of its results on chunks: the same idea as DTensor's ``Partial("sum")``.

A rule is a function that takes a `Call` and returns a `Spec`, or ``None`` where it can not tell.
One `Spec` answers every question the passes have: which output dim carries the streamed axis,
whether the result is partial, and which chunk of each input a chunk of the output needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Size = int | torch.SymInt
Letter = str
Dims = tuple[tuple[Letter, ...], ...]
"""One tuple of letters, outermost first, for each dim of a tensor. A dim of size 1 has none."""


@dataclass(frozen=True)
class Call:
    """One call of an op: what a rule sees.

    ``args`` and ``kwargs`` are as in the call, with every tensor replaced by a (fake or real)
    tensor that has its shape and dtype. ``tensors`` lists the tensors in flattened order (args,
    then kwargs, lists opened); ``outputs`` lists the output tensors (``None`` where an output is
    not a tensor). ``constant`` maps an index in ``tensors`` to the number that every element of
    that tensor is known to equal: an op that adds onto its base adds it once per chunk, and is a
    sum over chunks only where the base is known to be zero.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor | None, ...]
    constant: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """The part ``[start, start + length)`` of one letter, for which an op is called anew."""

    letter: Letter
    start: Size
    length: Size


Resize = Callable[[Sequence[tuple[Size, ...] | None], Chunk], dict[str, Any]]
"""``resize(output_shapes, chunk)``: the arguments that change for a chunk, by name.

``output_shapes`` are the shapes that the chunk's outputs must have. Tensors are no concern of
this: those that carry the letter are cut by whoever makes the call.
"""


def output_size(name: str) -> Resize:
    """The argument ``name`` is the shape of the only output."""
    return lambda output_shapes, chunk: {name: list(output_shapes[0] or ())}


@dataclass(frozen=True)
class Spec:
    """The letters of one call.

    inputs
        One `Dims` for each tensor in ``Call.tensors``.
    outputs
        One `Dims` for each output, ``None`` for one that is not a tensor.
    sizes
        The size of each letter.
    whole
        Letters the op is not local in. Letters found in no output must be here or in ``sums``.
    sums
        Letters the op adds over.
    resize
        Which arguments change for a chunk; ``None`` where none does. Ops with literal sizes
        (``view``, ``expand``, ``full``, ``iota``) have one.
    positional
        Whether ``resize`` reads where the chunk starts, so that a chunk must be one stretch of
        its letter (``iota``).
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[Letter, Size]
    whole: frozenset[Letter] = frozenset()
    sums: frozenset[Letter] = frozenset()
    resize: Resize | None = field(default=None, compare=False)
    positional: bool = False

    def local_letters(self) -> list[Letter]:
        """The letters that can be streamed from inputs to outputs, in order of appearance."""
        seen: dict[Letter, None] = {}
        for dims in self.outputs:
            for letters in dims or ():
                seen.update(dict.fromkeys(letters))
        return [letter for letter in seen if letter not in self.whole]


Rule = Callable[[Call], Spec | None]

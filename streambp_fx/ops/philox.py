"""``streambp::uniform``: random numbers that are a function of a seed and a position.

``aten.rand`` draws from a generator's state, so that its numbers depend on the order and the
shapes of the draws: a loop over chunks that computes the forward again in backward can not draw
the same mask. A counter-based generator can. Each element hashes its own coordinates with
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by a
seed, so that every chunking along any dims gives the numbers of the whole.

The hash is written in int64 tensor ops on 32-bit words, without overflow: C++ compilers take
signed overflow as impossible and may drop the masks that would undo it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import SymInt, Tensor

Size = int | SymInt
Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORDS = 4

_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Binary digits of each dtype's significand: the resolution of a uniform number in it."""

torch.library.define(
    "streambp::uniform",
    "(Tensor seed, SymInt[] size, SymInt[] offset, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("streambp::uniform", "CompositeExplicitAutograd")
@torch.no_grad()
def _uniform(
    seed: Tensor, size: Sequence[int], offset: Sequence[int], dtype: torch.dtype
) -> Tensor:
    if seed.ndim != 0 or seed.dtype != torch.int64:
        raise ValueError(
            "streambp::uniform takes a 0-d int64 seed, got one of shape "
            f"{tuple(seed.shape)} and {seed.dtype}"
        )
    if len(size) != len(offset):
        raise ValueError(
            f"streambp::uniform takes one offset for each dim, got size {list(size)} and offset "
            f"{list(offset)}"
        )
    if dtype not in _DIGITS:
        raise ValueError(f"streambp::uniform has no numbers of {dtype}; it knows {list(_DIGITS)}")
    return uniform_decomposition(seed, size, offset, dtype)


@torch.library.register_fake("streambp::uniform")
def _(seed: Tensor, size: Sequence[Size], offset: Sequence[Size], dtype: torch.dtype) -> Tensor:
    return seed.new_empty(size, dtype=dtype)


uniform = torch.ops.streambp.uniform.default


def uniform_decomposition(
    seed: Tensor, size: Sequence[Size], offset: Sequence[Size], dtype: torch.dtype
) -> Tensor:
    """Uniform numbers in [0, 1), as pointwise ops on ``arange``.

    Args:
        seed: int64, 0-d.
        size: the shape of the result.
        offset: for each dim, the coordinate of the result's first element in the whole tensor.
        dtype: of the result; its numbers are multiples of the resolution near 1 and never 1.

    Usable in a decomposition table, where it lets the compiler fuse the numbers into their use.
    """
    words = _hash_coordinates(seed, size, offset)
    digits = _DIGITS[dtype]
    if dtype is torch.float64:
        high, low = words[0] >> 5, words[1] >> 6
        return (high.to(dtype) * 2.0**26 + low.to(dtype)) * 2.0**-53
    # A product with a power of two is exact, and so is a cast of `digits` binary digits.
    return (words[0] >> (32 - digits)).to(dtype) * 2.0**-digits


def _hash_coordinates(seed: Tensor, size: Sequence[Size], offset: Sequence[Size]) -> Words:
    """Four 32-bit words for each element, in int64 tensors of shape ``size``."""
    ndim = len(size)
    coordinates = []
    for dim, (length, start) in enumerate(zip(size, offset, strict=True)):
        # torch's stubs do not know that SymInts are taken where ints are.
        along = torch.arange(cast("int", length), dtype=torch.int64, device=seed.device)
        words = (along + cast("int", start)) & _MASK
        coordinates.append(words.view([-1 if i == dim else 1 for i in range(ndim)]))
    key = (seed & _MASK, (seed >> 32) & _MASK)
    # Four coordinates fill a counter. More dims are hashed four at a time, each hash keyed by the
    # one before: no product of sizes enters, which would differ from chunk to chunk.
    while len(coordinates) > _WORDS:
        key = _philox(_counter(seed, coordinates[:_WORDS]), key)[:2]
        coordinates = coordinates[_WORDS:]
    return _philox(_counter(seed, coordinates), key)


def _counter(seed: Tensor, coordinates: Sequence[Tensor]) -> Words:
    words = [*coordinates, *[torch.zeros_like(seed)] * (_WORDS - len(coordinates))]
    return words[0], words[1], words[2], words[3]


def _philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 of broadcastable int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``word * multiplier``, for a multiplier of at least 2**31.

    With ``m = multiplier - 2**32``, between -2**31 and 0, the product is ``word * m`` (above
    -2**63) plus ``word * 2**32``, which adds ``word`` to the high word.
    """
    product = word * (multiplier - 2**32)
    return (product >> 32) + word, product & _MASK

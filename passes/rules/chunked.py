"""Running an op chunk by chunk as its `Spec` says, and comparing with running it whole.

This is the meaning of a `Spec`, written with plain tensors: `rule_validation` compares every rule
with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .arguments import outputs_in, replaced, tensors_in
from .spec import Call, Chunk, Dims, Letter, Spec

aten = torch.ops.aten

# Their memory is not initialised: chunks agree in shape and dtype alone.
_UNSET = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
# A chunk of a merged dim is not viewable: loop bodies hold reshapes.
_IN_BODIES = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


def record_call(
    target: Any, *args: Any, constant: Mapping[int, float] | None = None, **kwargs: Any
) -> Call:
    """Run ``target`` on real tensors and describe that call.

    ``constant``: the tensors that are filled with one number, as in `Call`.
    """
    result = target(*args, **kwargs)
    return Call(
        target, args, kwargs, tensors_in(args, kwargs), outputs_in(result), dict(constant or {})
    )


def ragged(size: int) -> list[range]:
    """``size`` positions in three stretches of lengths 1, 2, and the rest."""
    edges = sorted({0, min(1, size - 1), min(3, size), size})
    return [range(start, end) for start, end in itertools.pairwise(edges)]


def interleaved(size: int) -> list[range]:
    """The even positions and the odd ones: what an inner factor of a letter looks like."""
    return [range(0, size, 2), range(1, size, 2)]


def difference(call: Call, spec: Spec, letter: Letter, chunks: Sequence[range]) -> str | None:
    """What differs between the op on the whole and on chunks of ``letter``; ``None`` if nothing.

    The outputs on chunks are put together along the letter, or added if no output carries it.
    Integers and booleans must be equal, floating-point numbers close for their precision.
    ``call`` must hold real tensors. Chunks that are no stretch need a spec that is not
    ``positional``.
    """
    pieces: list[tuple[torch.Tensor | None, ...]] = []
    for positions in chunks:
        try:
            pieces.append(_run_chunk(call, spec, letter, positions))
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return f"chunk {positions} raises {type(error).__name__}: {error}"
        if len(pieces[-1]) != len(spec.outputs):
            return f"chunk {positions} gives {len(pieces[-1])} outputs, not {len(spec.outputs)}"
    for index, (dims, whole) in enumerate(zip(spec.outputs, call.outputs, strict=True)):
        if dims is None or whole is None:
            continue
        parts = [part for piece in pieces if (part := piece[index]) is not None]
        try:
            joined = _join(parts, dims, spec, letter, chunks)
        except (RuntimeError, IndexError) as error:
            return f"chunks of output {index} do not join: {error}"
        found = _compare(joined, whole, values=call.target not in _UNSET)
        if found is not None:
            return f"output {index}: {found}"
    return None


def _run_chunk(
    call: Call, spec: Spec, letter: Letter, positions: range
) -> tuple[torch.Tensor | None, ...]:
    chunks = iter(
        [
            _take(tensor, dims, spec, letter, positions)
            for tensor, dims in zip(call.tensors, spec.inputs, strict=True)
        ]
    )

    def chunked(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(chunks)
        if isinstance(value, (list, tuple)):
            return type(value)(chunked(item) for item in value)
        return value

    args = tuple(chunked(value) for value in call.args)
    kwargs = {name: chunked(value) for name, value in call.kwargs.items()}
    if spec.resize is not None:
        chunk = Chunk(letter, positions.start, len(positions))
        shapes = [_chunk_shape(dims, spec, chunk) for dims in spec.outputs]
        args, kwargs = replaced(call.target, args, kwargs, spec.resize(shapes, chunk))
    return outputs_in(_IN_BODIES.get(call.target, call.target)(*args, **kwargs))


def _chunk_shape(dims: Dims | None, spec: Spec, chunk: Chunk) -> tuple[int, ...] | None:
    if dims is None:
        return None
    shape = []
    for letters in dims:
        size = 1
        for letter in letters:
            size *= int(chunk.length if letter == chunk.letter else spec.sizes[letter])
        shape.append(size)
    return tuple(shape)


def _take(
    tensor: torch.Tensor, dims: Dims, spec: Spec, letter: Letter, positions: range
) -> torch.Tensor:
    """The chunk of a tensor: split the dim into its letters, take of one, merge them again."""
    for dim, letters in enumerate(dims):
        if letter in letters:
            factors = tensor.unflatten(dim, [int(spec.sizes[own]) for own in letters])
            at = dim + letters.index(letter)
            part = factors.index_select(at, torch.tensor(positions))
            return part.flatten(dim, dim + len(letters) - 1)
    return tensor


def _join(
    parts: Sequence[torch.Tensor], dims: Dims, spec: Spec, letter: Letter, chunks: Sequence[range]
) -> torch.Tensor:
    for dim, letters in enumerate(dims):
        if letter in letters:
            at = dim + letters.index(letter)
            split = [
                part.unflatten(
                    dim,
                    [len(positions) if own == letter else int(spec.sizes[own]) for own in letters],
                )
                for part, positions in zip(parts, chunks, strict=True)
            ]
            order = torch.tensor([place for positions in chunks for place in positions]).argsort()
            joined = torch.cat(split, at).index_select(at, order)
            return joined.flatten(dim, dim + len(letters) - 1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _compare(ours: torch.Tensor, whole: torch.Tensor, *, values: bool) -> str | None:
    if ours.shape != whole.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(whole.shape)}"
    if ours.dtype != whole.dtype:
        return f"dtype {ours.dtype} instead of {whole.dtype}"
    if not values:
        return None
    inexact = whole.dtype.is_floating_point or whole.dtype.is_complex
    tolerance = 0.0 if not inexact else 64 * torch.finfo(whole.dtype).eps
    if torch.allclose(
        ours.resolve_conj(), whole.resolve_conj(), rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        return None
    return f"values differ: {ours.flatten()[:4].tolist()} ... instead of " + str(
        whole.flatten()[:4].tolist()
    )

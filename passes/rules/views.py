"""Reshapes and dim shuffles: ops that keep every element and only rename its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import argument, overloads
from .factors import reshape_letters
from .letters import Letters, align_right, letters_in, shape_of, wrap_dim, wrap_dims
from .registry import register_rule
from .sizes import same_size
from .spec import Call, Chunk, Size, Spec, output_size

aten = torch.ops.aten

# Left out: as_strided, _reshape_alias and set_ (strides of the whole say nothing about a chunk's);
# view_copy variants (functionalization has none); diagonal and tril/triu with the matrix dims
# streamed (a chunk of rows starts at another diagonal).


def reshape_spec(call: Call) -> Spec | None:
    """``view``: the sizes come from the output, since the argument may hold ``-1``."""
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    letters = Letters()
    factors = reshape_letters(letters, shape_of(source), shape_of(output))
    if factors is None:
        return None
    inputs, outputs, whole = factors
    name = "shape" if call.target is aten.reshape.default else "size"
    return Spec(
        inputs=(inputs,),
        outputs=(outputs,),
        sizes=letters.sizes,
        whole=whole,
        resize=output_size(name),
    )


register_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)(reshape_spec)


@register_rule(aten.view.dtype)
def view_dtype_spec(call: Call) -> Spec | None:
    """A bit cast. Between dtypes of different width, positions of the last dim are regrouped."""
    (source,), (output,) = call.tensors, call.outputs
    if output is None or source.dim() != output.dim():
        return None
    letters = Letters()
    dims = letters.each("d", source.shape)
    if source.element_size() == output.element_size():
        return Spec((dims,), (dims,), letters.sizes)
    last = letters.one("out", output.shape[-1])
    whole = letters_in((last,), dims[-1:])
    return Spec((dims,), ((*dims[:-1], last),), letters.sizes, whole=whole)


@register_rule(aten.expand.default)
def expand_spec(call: Call) -> Spec | None:
    """A letter that only the output has repeats the input's one position."""
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    letters = Letters()
    dims = letters.each("d", output.shape)
    aligned = align_right(shape_of(source), shape_of(output), dims)
    if aligned is None:
        return None
    return Spec((aligned,), (dims,), letters.sizes, resize=output_size("size"))


@register_rule(aten.repeat.default)
def repeat_spec(call: Call) -> Spec | None:
    """Dim ``n`` repeated ``r`` times is ``(r n)``, and both letters are local."""
    (source,), repeats = call.tensors, list(argument(call, "repeats"))
    letters = Letters()
    added = len(repeats) - source.dim()
    copies = [letters.one(f"r{index}", size) for index, size in enumerate(repeats)]
    copied: list[Size] = [*([1] * added), *source.shape]
    inputs = letters.each("d", source.shape)
    outputs = (
        *copies[:added],
        *(copy + own for copy, own in zip(copies[added:], inputs, strict=True)),
    )

    def resize(output_shapes: Sequence[tuple[Size, ...] | None], chunk: Chunk) -> dict[str, Any]:
        # Of the two letters of an output dim one is chunked, and the other has its full size.
        # Any number of copies of an empty dim is empty.
        counts = [
            size // own if chunk.letter in copy and not same_size(own, 0) else count
            for size, own, copy, count in zip(
                output_shapes[0] or (), copied, copies, repeats, strict=True
            )
        ]
        return {"repeats": counts}

    return Spec((inputs,), (outputs,), letters.sizes, resize=resize)


@register_rule(*overloads(aten, "unsqueeze"))
def unsqueeze_spec(call: Call) -> Spec | None:
    (source,) = call.tensors
    letters = Letters()
    dims = letters.each("d", source.shape)
    at = wrap_dim(argument(call, "dim"), source.dim() + 1)
    return Spec((dims,), ((*dims[:at], (), *dims[at:]),), letters.sizes)


@register_rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze_spec(call: Call) -> Spec | None:
    """Dims named for squeezing that are not of size 1 stay, but are `whole`.

    A chunk of length 1 along one of them would lose its dim.
    """
    (source,), (output,) = call.tensors, call.outputs
    if output is None:
        return None
    named = wrap_dims(None, source.dim())
    if call.target is not aten.squeeze.default:
        dim = argument(call, "dim")
        named = wrap_dims(dim, source.dim()) if isinstance(dim, int) or dim else ()
    letters = Letters()
    dims = letters.each("d", source.shape)
    dropped = {index for index in named if index < source.dim() and not dims[index]}
    kept = tuple(own for index, own in enumerate(dims) if index not in dropped)
    if len(kept) != output.dim():
        # A size is 1 for some values of its symbols only.
        return None
    whole = letters_in(tuple(dims[index] for index in named if index < source.dim()))
    return Spec((dims,), (kept,), letters.sizes, whole=whole)


def _permuted(call: Call, order: Sequence[int]) -> Spec:
    (source,) = call.tensors
    letters = Letters()
    dims = letters.each("d", source.shape)
    return Spec((dims,), (tuple(dims[index] for index in order),), letters.sizes)


@register_rule(aten.permute.default)
def permute_spec(call: Call) -> Spec | None:
    ndim = call.tensors[0].dim()
    return _permuted(call, [wrap_dim(dim, ndim) for dim in argument(call, "dims")])


@register_rule(aten.transpose.int, aten.t.default)
def transpose_spec(call: Call) -> Spec | None:
    ndim = call.tensors[0].dim()
    order = list(range(ndim))
    if call.target is aten.t.default:
        return _permuted(call, order[::-1])
    first = wrap_dim(argument(call, "dim0"), ndim)
    second = wrap_dim(argument(call, "dim1"), ndim)
    if ndim:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


@register_rule(aten.view_as_real.default)
def view_as_real_spec(call: Call) -> Spec | None:
    """The new last dim, real and imaginary part, is of no chunk: it is `whole`."""
    (source,) = call.tensors
    letters = Letters()
    dims = letters.each("d", source.shape)
    parts = letters.one("parts", 2)
    return Spec((dims,), ((*dims, parts),), letters.sizes, whole=frozenset(parts))


@register_rule(aten.view_as_complex.default)
def view_as_complex_spec(call: Call) -> Spec | None:
    (source,) = call.tensors
    letters = Letters()
    dims = letters.each("d", source.shape)
    return Spec((dims,), (dims[:-1],), letters.sizes, whole=letters_in(dims[-1:]))

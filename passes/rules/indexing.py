"""Gathers and scatters: the places that are indexed are `whole`, the indices are local.

``embedding(weight, ids)`` reads any row of ``weight`` but one place of ``ids`` for one of the
output. Scattering turns this round: a place of the output may be written from any index, so the
output's indexed dims are `whole`, and the letters of the indices are gone from it. They are
`sums` if the op adds its values onto a base that is known to be zero. Onto any other base, the
result on each chunk would hold the base again, and the letters are `whole`.

Left out: masked_scatter, masked_select, nonzero, take, put (they count or index flattened
positions); boolean masks as indices (their output's size depends on data); searchsorted (the
letters of its sequences and values depend on ranks that models do not use).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .arguments import argument
from .letters import Letters, align_right, letters_in, shape_of, wrap_dim
from .registry import register_rule
from .sizes import same_size
from .spec import Call, Dims, Letter, Size, Spec

aten = torch.ops.aten


def _spec_of_write(
    call: Call,
    inputs: Sequence[Dims],
    output: Dims,
    letters: Letters,
    whole: frozenset[Letter],
    *,
    adds: bool,
) -> Spec:
    """The spec of an op that writes values into ``call.tensors[0]``, its base."""
    gone = letters_in(*inputs) - letters_in(output) - whole
    is_sum = adds and call.constant.get(0) == 0
    return Spec(
        tuple(inputs),
        (output,),
        letters.sizes,
        whole=whole if is_sum else whole | gone,
        sums=gone if is_sum else frozenset(),
    )


@register_rule(aten.embedding.default)
def embedding_spec(call: Call) -> Spec | None:
    weight, ids = call.tensors
    letters = Letters()
    rows, columns = letters.one("rows", weight.shape[0]), letters.one("columns", weight.shape[1])
    places = letters.each("i", ids.shape)
    return Spec(
        ((rows, columns), places), ((*places, columns),), letters.sizes, whole=frozenset(rows)
    )


@register_rule(aten.embedding_dense_backward.default)
def embedding_dense_backward_spec(call: Call) -> Spec | None:
    """Adds each place's gradient to its row, onto zeros that the op makes itself."""
    grad, ids = call.tensors
    letters = Letters()
    places = letters.each("i", ids.shape)
    columns = letters.one("columns", grad.shape[-1])
    rows = letters.one("rows", argument(call, "num_weights"))
    # Scaling by frequency divides by counts over all places.
    is_sum = not argument(call, "scale_grad_by_freq")
    return Spec(
        ((*places, columns), places),
        ((rows, columns),),
        letters.sizes,
        whole=frozenset(rows) if is_sum else letters_in((rows,), places),
        sums=letters_in(places) if is_sum else frozenset(),
    )


@register_rule(aten.gather.default)
def gather_spec(call: Call) -> Spec | None:
    source, index = call.tensors
    if source.dim() != index.dim():
        return None
    letters = Letters()
    dim = wrap_dim(argument(call, "dim"), index.dim())
    output = letters.each("i", index.shape)
    inputs, whole = _beside(letters, shape_of(source), shape_of(index), output, dim, "in")
    return Spec((inputs, output), (output,), letters.sizes, whole=whole)


def _beside(
    letters: Letters, shape: Sequence[Size], other: Sequence[Size], dims: Dims, dim: int, name: str
) -> tuple[Dims, frozenset[Letter]]:
    """Letters for a tensor that is indexed along ``dim`` and read or written in step elsewhere.

    ``other`` and ``dims`` are the shape and the letters of the tensor it is in step with. Where
    it is larger than that one, chunks of the two would not start at the same place: both letters
    are `whole`.
    """
    found: list[tuple[Letter, ...]] = []
    whole: set[Letter] = set()
    for index, size in enumerate(shape):
        if index != dim and same_size(size, other[index]):
            found.append(dims[index])
            continue
        own = letters.one(f"{name}{index}", size)
        found.append(own)
        whole.update(own)
        if index != dim:
            whole.update(dims[index])
    return tuple(found), frozenset(whole)


@register_rule(
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
def scatter_spec(call: Call) -> Spec | None:
    base, index = call.tensors[:2]
    if base.dim() != index.dim():
        return None
    letters = Letters()
    dim = wrap_dim(argument(call, "dim"), index.dim())
    places = letters.each("i", index.shape)
    output, whole = _beside(letters, shape_of(base), shape_of(index), places, dim, "out")
    inputs = [output, places]
    for source in call.tensors[2:]:
        # The values may be larger than the index in every dim; what is beyond is not read.
        dims, mixed = _beside(letters, shape_of(source), shape_of(index), places, -1, "src")
        inputs.append(dims)
        whole |= mixed
    adds = call.target is aten.scatter_add.default or (
        call.target in (aten.scatter.reduce, aten.scatter_reduce.two)
        and argument(call, "reduce") in ("add", "sum")
    )
    return _spec_of_write(call, inputs, output, letters, whole, adds=adds)


@register_rule(aten.index_select.default)
def index_select_spec(call: Call) -> Spec | None:
    source, index = call.tensors
    if source.dim() == 0 or index.dim() != 1:
        return None
    letters = Letters()
    dim = wrap_dim(argument(call, "dim"), source.dim())
    dims = letters.each("d", source.shape)
    places = letters.one("i", index.shape[0])
    output = (*dims[:dim], places, *dims[dim + 1 :])
    return Spec((dims, (places,)), (output,), letters.sizes, whole=frozenset(dims[dim]))


@register_rule(aten.index_add.default, aten.index_copy.default)
def index_add_spec(call: Call) -> Spec | None:
    base, index, source = call.tensors
    if base.dim() == 0 or index.dim() != 1 or base.dim() != source.dim():
        return None
    letters = Letters()
    dim = wrap_dim(argument(call, "dim"), base.dim())
    dims = letters.each("d", base.shape)
    places = letters.one("i", index.shape[0])
    values = (*dims[:dim], places, *dims[dim + 1 :])
    adds = call.target is aten.index_add.default
    whole = frozenset(dims[dim])
    return _spec_of_write(call, [dims, (places,), values], dims, letters, whole, adds=adds)


class _Advanced:
    """The letters of ``tensor[indices]`` with index tensors and ``None`` (a full slice).

    The broadcast dims of the index tensors stand where the first of them stood, or in front if a
    ``None`` separates two of them.
    """

    def __init__(self, source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
        self.letters = Letters()
        self.indices = [index for index in indices if index is not None]
        self.source = self.letters.each("d", source.shape)
        at = [dim for dim, index in enumerate(indices) if index is not None]
        self.indexed = letters_in(tuple(self.source[dim] for dim in at))
        self.block: tuple[Size, ...] = tuple(
            torch.broadcast_shapes(*(shape_of(index) for index in self.indices))
        )
        self.places = self.letters.each("i", self.block)
        adjacent = at == list(range(at[0], at[-1] + 1))
        first = at[0] if adjacent else 0
        rest = [dim for dim in range(source.dim()) if dim not in at]
        before, after = rest[:first], rest[first:]
        self.shape = (
            *(source.shape[dim] for dim in before),
            *self.block,
            *(source.shape[dim] for dim in after),
        )
        self.dims: Dims = (
            *(self.source[dim] for dim in before),
            *self.places,
            *(self.source[dim] for dim in after),
        )

    def index_dims(self) -> list[Dims] | None:
        """The letters of each index tensor."""
        found = [align_right(shape_of(index), self.block, self.places) for index in self.indices]
        return None if any(dims is None for dims in found) else [d for d in found if d is not None]

    def aligned(self, tensor: torch.Tensor) -> Dims | None:
        """The letters of a tensor that broadcasts to ``source[indices]``."""
        return align_right(shape_of(tensor), self.shape, self.dims)


def _advanced(call: Call) -> _Advanced | None:
    """``None`` without index tensors, or with boolean ones, whose result has a size in data."""
    indices = argument(call, "indices")
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    return _Advanced(call.tensors[0], indices)


@register_rule(aten.index.Tensor, aten._unsafe_index.Tensor, aten._unsafe_masked_index.default)
def index_spec(call: Call) -> Spec | None:
    advanced = _advanced(call)
    if advanced is None:
        return None
    inputs: list[Dims | None] = [advanced.source]
    if call.target is aten._unsafe_masked_index.default:
        inputs.append(advanced.aligned(call.tensors[1]))
    places = advanced.index_dims()
    if places is None or None in inputs:
        return None
    return Spec(
        (*(dims for dims in inputs if dims is not None), *places),
        (advanced.dims,),
        advanced.letters.sizes,
        whole=advanced.indexed,
    )


@register_rule(
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
)
def index_put_spec(call: Call) -> Spec | None:
    advanced = _advanced(call)
    if advanced is None:
        return None
    masked = call.target is aten._unsafe_masked_index_put_accumulate.default
    places, values = advanced.index_dims(), advanced.aligned(call.tensors[-1])
    if places is None or values is None:
        return None
    inputs: list[Dims] = [advanced.source]
    if masked:
        mask = advanced.aligned(call.tensors[1])
        if mask is None:
            return None
        inputs.append(mask)
    inputs += [*places, values]
    adds = masked or bool(argument(call, "accumulate"))
    return _spec_of_write(
        call, inputs, advanced.source, advanced.letters, advanced.indexed, adds=adds
    )


@register_rule(aten.bucketize.Tensor)
def bucketize_spec(call: Call) -> Spec | None:
    values, boundaries = call.tensors
    letters = Letters()
    dims = letters.each("d", values.shape)
    edges = letters.each("edges", boundaries.shape)
    return Spec((dims, edges), (dims,), letters.sizes, whole=letters_in(edges))

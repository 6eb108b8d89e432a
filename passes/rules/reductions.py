"""Reductions: the dims that are kept are local.

A plain ``sum`` is the sum of its chunks' sums, so its reduced letters are `sums`. Every other
reduction leaves its reduced letters `whole`: a mean of chunk means is not the mean (the lead
factor is another for each chunk), and a maximum is not added.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .arguments import argument, has_argument, overloads
from .letters import Letters, wrap_dims
from .registry import register_rule
from .spec import Call, Dims, Spec

aten = torch.ops.aten

_ADDING = ("sum", "nansum", "count_nonzero")
_MIXING = (
    *("mean", "nanmean", "prod", "amax", "amin", "aminmax", "argmax", "argmin", "any", "all"),
    *("var", "std", "var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm"),
    *("median", "nanmedian", "mode", "kthvalue"),
)
# These packets also hold pointwise overloads.
_MIXING_OVERLOADS = (aten.max.default, aten.max.dim, aten.min.default, aten.min.dim)

# Left out: histc, bincount, unique (they return counts over all tokens, in no order of tokens);
# trace (its diagonal); layer and group norms (decomposed into var_mean and pointwise ops).


def _reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that the call reduces; all of them where it names none."""
    ndim = call.tensors[0].dim()
    for name in ("dim", "dims"):
        if has_argument(call, name):
            return wrap_dims(argument(call, name), ndim)
    return wrap_dims(None, ndim)


def reduction_spec(call: Call, dims: Iterable[int], *, adds: bool) -> Spec | None:
    """The spec of an op that reduces ``dims`` of its one tensor.

    ``adds`` says that the result is the sum of the results on chunks. Kept dims are told from the
    outputs' rank. Returns ``None`` where the outputs have neither all dims nor the kept ones.
    """
    (source,) = call.tensors
    reduced = {dim for dim in dims if dim < source.dim()}
    letters = Letters()
    inputs = letters.each("d", source.shape)
    dropped: Dims = tuple(own for dim, own in enumerate(inputs) if dim not in reduced)
    kept: Dims = tuple(() if dim in reduced else own for dim, own in enumerate(inputs))
    outputs: list[Dims | None] = []
    for output in call.outputs:
        if output is None:
            outputs.append(None)
        elif output.dim() == len(kept):
            outputs.append(kept)
        elif output.dim() == len(dropped):
            outputs.append(dropped)
        else:
            return None
    gone = frozenset(letter for dim in reduced for letter in inputs[dim])
    return Spec(
        (inputs,),
        tuple(outputs),
        letters.sizes,
        whole=frozenset() if adds else gone,
        sums=gone if adds else frozenset(),
    )


@register_rule(*overloads(aten, *_ADDING))
def adding_spec(call: Call) -> Spec | None:
    return reduction_spec(call, _reduced_dims(call), adds=True)


@register_rule(*overloads(aten, *_MIXING), *_MIXING_OVERLOADS)
def mixing_spec(call: Call) -> Spec | None:
    return reduction_spec(call, _reduced_dims(call), adds=False)

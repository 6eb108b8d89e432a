"""Is a backward graph linear in its tangent? Autograd's own formulas are; a user's need not be.

A custom ``autograd.Function`` or a hook may clip or normalise a gradient. Such a graph, run with a
unit tangent and scaled afterwards, would give another gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Set

import torch
from torch.fx import Node

from .axes import ATTENTION_BACKWARD
from .dataflow import VIEWS
from .placement import tensor_inputs, value_of
from .rules.arguments import overloads
from .rules.calls import constant_fill

aten = torch.ops.aten
prims = torch.ops.prims

IN_ONE = {
    *VIEWS,
    *(aten.neg.default, aten.clone.default, aten._to_copy.default),
    *(prims.convert_element_type.default, operator.getitem, aten.flip.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.gather.default, aten.index.Tensor, aten.embedding.default, aten.cumsum.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.repeat.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.embedding_dense_backward.default),
}
"""Linear in the first argument; the others must not depend on the tangent."""

IN_EACH = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}
"""Linear in all tensor arguments together; each must depend on the tangent or be zero."""

BILINEAR = {aten.mul.Tensor, aten.mm.default, aten.bmm.default, aten.dot.default, aten.mv.default}
"""Linear in each argument; one alone may depend on the tangent."""

PRODUCT_AND_SUM = set(overloads(prims, "fma"))
"""``a * b + c``: linear if either ``a`` or ``b`` depends on the tangent, and ``c`` does or is 0."""

ACCUMULATING = {
    aten.index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten.scatter_add.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.scatter.src,
}
"""Linear in base and values together; indices must not depend on the tangent."""


LINEAR_DTYPES = {torch.float64, torch.float32, torch.bfloat16}
"""In which a value scaled before a cast is, up to rounding, one that is scaled after it."""

SHAPE_ALONE = {
    *(aten.new_zeros.default, aten.zeros_like.default, aten.full_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.empty_like.default),
}
"""Read a shape and a dtype, no value."""


def is_linear(node: Node, dependent: Set[Node]) -> bool:
    """Whether ``node`` is a linear function of its inputs in ``dependent``."""
    inputs = tensor_inputs(node)
    if node.target is operator.getitem:
        return True
    reads = [index for index, source in enumerate(inputs) if source in dependent]
    if not reads or node.target in SHAPE_ALONE:
        return True
    value = value_of(node)
    if isinstance(value, torch.Tensor) and value.dtype not in LINEAR_DTYPES:
        return False
    if node.target is aten.copy.default:
        return 1 in reads
    if node.target is aten.masked_fill.Scalar:
        return reads == [0] and not node.args[2]
    if node.target in IN_ONE:
        return reads == [0]
    if node.target in IN_EACH:
        return all(source in dependent or constant_fill(source) == 0 for source in inputs) and (
            node.target in (aten.cat.default, aten.stack.default) or len(inputs) == 2
        )
    if node.target in BILINEAR:
        return len(reads) == 1
    if node.target in PRODUCT_AND_SUM and len(inputs) == 3:
        added = inputs[2] in dependent or constant_fill(inputs[2]) == 0
        return added and (0 in reads) != (1 in reads)
    if node.target is aten.div.Tensor:
        return reads == [0]
    if node.target is aten.where.self:
        return 0 not in reads and all(
            source in dependent or constant_fill(source) == 0 for source in inputs[1:]
        )
    if node.target is aten.constant_pad_nd.default:
        return not (node.args[2] if len(node.args) > 2 else 0)
    if node.target in ACCUMULATING:
        ends = {0, len(inputs) - 1}
        fixed = inputs[0]
        return set(reads) <= ends and (fixed in dependent or constant_fill(fixed) == 0)
    if node.target is ATTENTION_BACKWARD:
        return reads == [0]
    return False

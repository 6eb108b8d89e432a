"""Pointwise ops: every output element needs the input elements at the same (broadcast) place.

One letter per output dim; inputs are aligned at the right. An input dim of size 1 under a larger
output dim carries no letter: each chunk reads the same position.
"""

from __future__ import annotations

import torch

from streambp_fx._torch import OpOverload

from .arguments import is_functional_tensor_op, overloads
from .letters import Letters, align_right, shape_of
from .registry import register_rule, register_tag_rule
from .sizes import same_shape
from .spec import Call, Dims, Spec

aten = torch.ops.aten
prims = torch.ops.prims

# Names whose every functional overload is pointwise. Ops that torch tags as pointwise need no row
# (see the last lines); these are the ones without the tag, and the ones in traced models, so that
# a version of torch with fewer tags streams the same models.
_ATEN = (
    # arithmetic
    *("add", "sub", "mul", "div", "rsub", "true_divide", "floor_divide", "remainder", "fmod"),
    *("neg", "abs", "sign", "sgn", "reciprocal", "square", "sqrt", "rsqrt", "positive"),
    *("addcmul", "addcdiv", "lerp", "maximum", "minimum", "fmax", "fmin", "pow", "float_power"),
    *("floor", "ceil", "round", "trunc", "frac", "nan_to_num"),
    *("clamp", "clamp_min", "clamp_max", "clip", "hypot", "copysign", "nextafter", "ldexp"),
    # exponentials, trigonometry, error functions
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logaddexp", "logaddexp2"),
    *("xlogy", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "polygamma"),
    # comparisons and logic
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("bitwise_left_shift", "bitwise_right_shift", "__and__", "__or__", "__xor__"),
    *("__lshift__", "__rshift__"),
    # activations and their backwards
    *("relu", "relu6", "gelu", "silu", "sigmoid", "softplus", "elu", "celu", "selu", "mish"),
    *("leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "threshold", "log_sigmoid_forward"),
    *("gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward", "softplus_backward"),
    *("elu_backward", "mish_backward", "leaky_relu_backward", "hardtanh_backward"),
    *("hardswish_backward", "hardsigmoid_backward", "threshold_backward", "logit_backward"),
    *("log_sigmoid_backward", "native_dropout_backward", "_prelu_kernel"),
    # choice
    *("masked_fill", "heaviside"),
    # copies, casts and fills of the same shape
    *("_to_copy", "alias", "clone", "copy", "detach", "fill", "lift_fresh", "lift_fresh_copy"),
    *("full_like", "zeros_like", "ones_like", "empty_like"),
    # complex numbers
    *("complex", "polar", "_conj", "conj_physical", "_neg_view", "angle"),
)
# Packets of which only some overloads are pointwise.
_ATEN_OVERLOADS = (
    aten.max.other,
    aten.min.other,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
)
_PRIMS = ("convert_element_type", "device_put", "fma", "view_of")

# Left out: rand_like, bernoulli, native_dropout, rrelu and every other op that draws random
# numbers. A chunk would draw others than the whole; random ops become a counter hash first.


def elementwise_spec(call: Call) -> Spec | None:
    """The spec of a pointwise op; for users who register their own.

    Returns ``None`` if the outputs differ in shape or an input does not broadcast to them.
    """
    outputs = [output for output in call.outputs if output is not None]
    if not outputs or any(not same_shape(out.shape, outputs[0].shape) for out in outputs):
        return None
    letters = Letters()
    shape = shape_of(outputs[0])
    dims = letters.each("d", shape)
    inputs: list[Dims] = []
    for tensor in call.tensors:
        aligned = align_right(shape_of(tensor), shape, dims)
        if aligned is None:
            return None
        inputs.append(aligned)
    return Spec(
        inputs=tuple(inputs),
        outputs=tuple(None if output is None else dims for output in call.outputs),
        sizes=letters.sizes,
    )


register_rule(*overloads(aten, *_ATEN), *overloads(prims, *_PRIMS), *_ATEN_OVERLOADS)(
    elementwise_spec
)


def _is_tagged_pointwise(target: object) -> bool:
    """Whether torch, or a user's library, says that the op is pointwise and draws nothing."""
    return (
        isinstance(target, OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and is_functional_tensor_op(target)
    )


register_tag_rule(_is_tagged_pointwise)(elementwise_spec)

"""Ops that have no rule on purpose, and why: the reason stands in the report of a barrier."""

from __future__ import annotations

from typing import Any

_RANDOM = "draws random numbers, and a chunk would draw others than the whole"
_COUNTS = "returns counts over all tokens, which have no order of tokens"
_EXPERTS = "its offsets count rows of the whole, so a chunk of rows would need other offsets"
_HALO = "mixes neighbours along the sequence, which takes a halo around each chunk"
_ATTENTION = "is replaced by the attention op before rules are asked"
_DATA_SIZE = "the size of its result depends on data"
_SCALAR = "yields a number to Python, so no chunk of it exists"
_FLAT = "counts positions in the flattened tensor"
_STRIDES = "the strides of the whole say nothing about those of a chunk"

LEFT_OUT: dict[str, str] = {
    "aten::rand": _RANDOM,
    "aten::randn": _RANDOM,
    "aten::rand_like": _RANDOM,
    "aten::randn_like": _RANDOM,
    "aten::randint": _RANDOM,
    "aten::randperm": _RANDOM,
    "aten::bernoulli": _RANDOM,
    "aten::multinomial": _RANDOM,
    "aten::native_dropout": _RANDOM,
    "aten::uniform": _RANDOM,
    "aten::normal": _RANDOM,
    "aten::rrelu": _RANDOM,
    "prims::inductor_random": _RANDOM,
    "aten::histc": _COUNTS,
    "aten::bincount": _COUNTS,
    "aten::_unique2": _COUNTS,
    "aten::_grouped_mm": _EXPERTS,
    "transformers::grouped_mm_fallback": _EXPERTS,
    "transformers::grouped_mm_fallback_backward": _EXPERTS,
    "aten::convolution": _HALO,
    "aten::convolution_backward": _HALO,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _ATTENTION,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _ATTENTION,
    "aten::_scaled_dot_product_flash_attention": _ATTENTION,
    "aten::_scaled_dot_product_flash_attention_backward": _ATTENTION,
    "aten::_scaled_dot_product_efficient_attention": _ATTENTION,
    "aten::_scaled_dot_product_efficient_attention_backward": _ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention": _ATTENTION,
    "aten::_scaled_dot_product_cudnn_attention_backward": _ATTENTION,
    "aten::nonzero": _DATA_SIZE,
    "aten::masked_select": _DATA_SIZE,
    "aten::masked_scatter": _FLAT,
    "aten::take": _FLAT,
    "aten::put": _FLAT,
    "aten::_local_scalar_dense": _SCALAR,
    "aten::_assert_scalar": _SCALAR,
    "aten::as_strided": _STRIDES,
    "aten::_reshape_alias": _STRIDES,
    "aten::linalg_solve_triangular": "solves along both matrix dims, each row from those before it",
    "aten::linspace": "its step depends on the whole length",
    "aten::trace": "reads the diagonal, where a chunk of rows starts at another column",
}
"""Qualified op name (every overload of it) -> why."""


def why_left_out(target: Any) -> str | None:
    """Why ``target`` has no rule, as a phrase that completes "the op ..."; ``None`` if untold."""
    schema = getattr(target, "_schema", None)
    return None if schema is None else LEFT_OUT.get(schema.name)

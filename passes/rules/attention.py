"""Rules of the attention ops: the batch is local, everything else is whole.

The sequence is left to the pass that turns attention into loops: a causal chunk of queries needs
a past of keys, which letters do not say. Heads are left out because grouped heads have two sizes.
"""

from __future__ import annotations

import torch

import streambp_fx.ops.attention  # noqa: F401  (defines the ops)

from .letters import Letters, align_right, letters_in, shape_of
from .registry import register_rule
from .spec import Call, Dims, Spec

streambp = torch.ops.streambp


@register_rule(streambp.attention.default)
def attention(call: Call) -> Spec | None:
    """``query, key, value, bias, seed -> out, logsumexp``."""
    return _spec(call, first_operand=0, rows="", outputs=("bhlv", "bhl"))


@register_rule(streambp.attention_backward.default)
def attention_backward(call: Call) -> Spec | None:
    """``grad_out, query, key, value, bias, seed, out, logsumexp -> gradients``."""
    return _spec(call, first_operand=1, rows="bhl", outputs=("bhle", "bgse", "bgsv"))


def _spec(call: Call, first_operand: int, rows: str, outputs: tuple[str, ...]) -> Spec | None:
    query, key, value, bias, seed = call.args[first_operand : first_operand + 5]
    dropout_p = call.args[-1]
    letters = Letters()
    named = {
        **dict(zip("bhle", letters.each("query", query.shape), strict=True)),
        **dict(zip("gs", letters.each("key", key.shape[1:3]), strict=True)),
        "v": letters.one("value", value.shape[3]),
    }

    def dims(names: str) -> Dims:
        return tuple(named[name] for name in names)

    inputs = [dims("bhle"), dims("bgse"), dims("bgsv")]
    if bias is not None:
        scores = (*query.shape[:3], key.shape[2])
        aligned = align_right(shape_of(bias), scores, dims("bhls"))
        if aligned is None:
            return None
        inputs.append(aligned)
    if seed is not None:
        inputs.append(())
    if rows:
        inputs = [dims(rows + "v"), *inputs, dims(rows + "v"), dims(rows)]
    # The dropout mask counts batch * heads from the first of the whole.
    local = frozenset() if dropout_p > 0.0 else letters_in((named["b"],))
    return Spec(
        inputs=tuple(inputs),
        outputs=tuple(dims(names) for names in outputs),
        sizes=letters.sizes,
        whole=frozenset(letters.sizes) - local,
    )

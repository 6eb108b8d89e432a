"""Rules of the attention ops: the batch is local, everything else is whole.

The sequence is left to the pass that turns attention into loops: a causal chunk of queries needs
a past of keys, which letters do not say.
"""

from __future__ import annotations

import torch

import streambp_fx.ops.attention  # noqa: F401  (defines the ops)

from .registry import register_rule
from .spec import Call, Dims, Letter, Size, Spec


@register_rule(
    torch.ops.streambp.attention.default, torch.ops.streambp.attention_backward.default
)
def attention(call: Call) -> Spec:
    """``b ... -> b ...`` for every operand that has a batch; a bias may have none."""
    sizes: dict[Letter, Size] = {}

    def dims(tensor: torch.Tensor) -> Dims:
        letters: list[tuple[Letter, ...]] = []
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, int) and size == 1:
                letters.append(())
                continue
            letter = "b" if dim == 0 and tensor.dim() == 4 or dim == 0 else f"{len(sizes)}"
            sizes[letter] = size
            letters.append((letter,))
        return tuple(letters)

    inputs = tuple(dims(tensor) for tensor in call.tensors)
    outputs = tuple(None if output is None else dims(output) for output in call.outputs)
    return Spec(inputs, outputs, sizes, whole=frozenset(sizes) - {"b"})

"""``streambp::uniform``: every dim is local, because each element hashes its own coordinates.

A chunk gets the chunk's size, and an offset that is larger by the chunk's start. A seed is a
scalar: it has no dim to be streamed along and is drawn once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from streambp_fx.ops.philox import uniform

from .arguments import argument
from .letters import Letters
from .registry import register_rule
from .spec import Call, Chunk, Size, Spec


@register_rule(uniform)
def uniform_spec(call: Call) -> Spec | None:
    (output,) = call.outputs
    if output is None:
        return None
    letters = Letters()
    dims = letters.each("d", output.shape)
    offset = list(argument(call, "offset"))

    def resize(output_shapes: Sequence[tuple[Size, ...] | None], chunk: Chunk) -> dict[str, Any]:
        moved = [
            start + chunk.start if chunk.letter in dim else start
            for start, dim in zip(offset, dims, strict=True)
        ]
        return {"size": list(output_shapes[0] or ()), "offset": moved}

    return Spec(((),), (dims,), letters.sizes, resize=resize, positional=True)


@register_rule(torch.ops.aten.randint.low)
def seed_spec(call: Call) -> Spec | None:
    """A scalar draw, which is a seed; ``None`` for more numbers, which a chunk can not repeat."""
    (output,) = call.outputs
    return Spec((), ((),), {}) if output is not None and output.ndim == 0 else None

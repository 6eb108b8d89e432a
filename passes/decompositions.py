"""Which ops are spelled out as smaller ones while the joint graph is traced.

Inductor's decompositions, and those of ours that turn an op that mixes tokens into ops that do
not: a mean is a sum, which can be added up chunk by chunk, and a division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from streambp_fx._torch import select_decomp_table

from .rules.sizes import product

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for AOTAutograd: from op overload to the function that spells it out."""
    return {
        **select_decomp_table(),
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.eye.default: _eye,
        aten.eye.m: _eye,
    }


def _eye(
    rows: int,
    columns: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Ones on the diagonal of a ``[rows, columns]`` matrix.

    Torch's own counts in the narrowest integers that hold the sizes, and ``uint16`` has no
    ``arange`` outside Inductor.
    """
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(rows if columns is None else columns, device=device)
    return (row == column).to(dtype or torch.get_default_dtype())


def _mean(
    value: Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The mean over ``dims``, or over all where there are none.

    The sum of fp16 values may exceed what fp16 can hold although their mean does not, so that
    narrow values are summed in fp32.
    """
    dtype = dtype or value.dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    chosen = list(dims) if dims else list(range(value.dim()))
    count = product(value.shape[dim] for dim in chosen)
    return (value.sum(chosen, keepdim, dtype=wide) / count).to(dtype)

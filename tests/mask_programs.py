"""Programs that make attention masks, and the check of what is claimed of one by its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx._torch import select_decomp_table
from streambp_fx.passes.mask_facts import MaskFacts, finite_fill, prove_mask

NEG_INF = float("-inf")
FP32_MIN = torch.finfo(torch.float32).min


def check_facts(facts: MaskFacts, mask: Tensor, length: int) -> None:
    """Compare each claim with the mask's numbers, ``[..., L, S]`` after broadcasting."""
    mask = (
        mask.expand(*mask.shape[:-2], length, length)
        if mask.dim() > 1
        else mask.expand(length, length)
    )
    row, column = torch.arange(length)[:, None], torch.arange(length)
    if mask.dtype == torch.bool:
        allowed = plain = mask
    else:
        allowed, plain = ~(mask <= finite_fill(mask.dtype)), mask == 0
        # A row of nothing but finite fills attends to all its keys.
        only_fills = ~allowed.any(-1, keepdim=True)
        allowed = allowed | (only_fills & mask.isfinite())
    future, past = column > row, column <= row
    if facts.implies_causal:
        assert not (allowed & future).any()
    if facts.exactly_causal:
        assert not (allowed & future).any() and (plain | future).all()
    if facts.within_causal:
        assert (plain | future).all()
    if facts.always_allowed:
        assert plain.all()
    if facts.rows_allow_self:
        assert plain.diagonal(dim1=-2, dim2=-1).all()
    if facts.window is not None:
        inside = column > row - facts.window
        assert not (allowed & ~inside).any()
        if facts.exactly_window_causal:
            assert ((plain == (inside & past)) | ~(inside & past)).all()
            assert not (allowed & ~(inside & past)).any()


def traced(program: Callable[..., Any], *inputs: Tensor, symbolic: bool) -> GraphModule:
    mode: Literal["symbolic", "fake"] = "symbolic" if symbolic else "fake"
    table = select_decomp_table()
    return make_fx(program, decomposition_table=table, tracing_mode=mode)(*inputs)


def mask_of(gm: GraphModule) -> Node:
    output = gm.graph.output_node().args[0]
    assert isinstance(output, Node)
    return output


def proven(program: Callable[..., Tensor], *inputs: Tensor, symbolic: bool = False) -> MaskFacts:
    """The facts of the program's mask, checked at the traced length."""
    gm = traced(program, *inputs, symbolic=symbolic)
    facts = prove_mask(mask_of(gm))
    check_facts(facts, program(*inputs), inputs[0].shape[1])
    return facts


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(x.shape[1])
    return place[:, None], place


def below(x: Tensor) -> Tensor:
    row, column = positions(x)
    return column <= row


def tril_of_ones(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(x.shape[1], x.shape[1]))[None, None] != 0


def tril_sliced(x: Tensor) -> Tensor:
    full = torch.ones(32, 32, dtype=torch.bool).tril().view(1, 1, 32, 32)
    return full[:, :, : x.shape[1], : x.shape[1]]


def not_above(x: Tensor) -> Tensor:
    row, column = positions(x)
    return ~(column > row)


def triu_of_inf(x: Tensor) -> Tensor:
    return torch.triu(torch.full((x.shape[1], x.shape[1]), NEG_INF), diagonal=1)


def filled_with_min(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[1], x.shape[1]).masked_fill(~below(x), FP32_MIN)


def inverted(x: Tensor) -> Tensor:
    return (1.0 - below(x).float()) * FP32_MIN


def headed(x: Tensor) -> Tensor:
    mask = below(x)[None, None].expand(x.shape[0], 4, -1, -1)
    return mask.reshape(x.shape[0] * 4, x.shape[1], x.shape[1])


def shifted_cat(x: Tensor) -> Tensor:
    """``le`` over positions that are put together from two pieces."""
    place = torch.arange(x.shape[1])
    pieces = torch.cat([place[:1], place[1:]])
    return pieces[None, :] <= pieces[:, None]


EXACTLY_CAUSAL = [
    below,
    tril_of_ones,
    tril_sliced,
    not_above,
    triu_of_inf,
    filled_with_min,
    inverted,
    headed,
    shifted_cat,
]


def window_of_three(x: Tensor) -> Tensor:
    row, column = positions(x)
    return (column <= row) & (column > row - 3)

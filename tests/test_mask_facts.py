"""Every fact that is claimed of a mask is checked against the mask's numbers.

Mask programs, written and random, are traced to aten, proven, and run; a wrong claim fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph

from streambp_fx.passes.mask_facts import MaskFacts, constant_facts, prove_mask

from .mask_programs import (
    EXACTLY_CAUSAL,
    FP32_MIN,
    NEG_INF,
    below,
    check_facts,
    mask_of,
    positions,
    proven,
    traced,
    window_of_three,
)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("program", EXACTLY_CAUSAL)
def test_causal_masks_are_proven_exactly(
    program: Callable[[Tensor], Tensor], symbolic: bool
) -> None:
    facts = proven(program, torch.zeros(3, 7), symbolic=symbolic)
    assert facts.exactly_causal and facts.rows_allow_self, facts.reason
    assert not facts.always_allowed


def window_by_distance(x: Tensor) -> Tensor:
    row, column = positions(x)
    return ((row - column).abs() < 3) & ~(column > row)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("program", [window_of_three, window_by_distance])
def test_windows(program: Callable[[Tensor], Tensor], symbolic: bool) -> None:
    facts = proven(program, torch.zeros(3, 7), symbolic=symbolic)
    assert facts.implies_causal and facts.window == 3 and facts.exactly_window_causal
    assert not facts.exactly_causal


def padded(x: Tensor, keep: Tensor) -> Tensor:
    return below(x)[None, None] & keep[:, None, None, :].bool()


def in_blocks(x: Tensor) -> Tensor:
    row, column = positions(x)
    return (column <= row) & (column // 3 == row // 3)


def packed(x: Tensor, place: Tensor) -> Tensor:
    breaks = (torch.diff(place, prepend=place[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = breaks[:, :, None] == breaks[:, None, :]
    return (same & (place[:, None, :] <= place[:, :, None]))[:, None]


def sloped(x: Tensor, slope: Tensor) -> Tensor:
    row, column = positions(x)
    bias = slope[:, None, None] * (column - row)
    return bias + torch.where(column <= row, 0.0, NEG_INF)


KEEP = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1] * 7])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 5, 6, 2, 3], list(range(7))])


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("program", "data", "allows_self"),
    [
        (padded, KEEP, False),
        (packed, PLACES, True),
        (sloped, torch.tensor([0.5, 0.25, 1.0]), False),
    ],
)
def test_masks_with_data_imply_causal(
    program: Callable[..., Tensor], data: Tensor, allows_self: bool, symbolic: bool
) -> None:
    facts = proven(program, torch.zeros(3, 7), data, symbolic=symbolic)
    assert facts.implies_causal and not facts.exactly_causal
    assert facts.rows_allow_self == allows_self or program is sloped
    assert "data" in facts.reason or program is sloped


def test_blocks_are_a_window() -> None:
    facts = proven(in_blocks, torch.zeros(3, 7), symbolic=True)
    assert facts.implies_causal and facts.window == 3 and facts.rows_allow_self
    assert not facts.exactly_window_causal


def test_documents_told_by_other_breaks_are_not_proven() -> None:
    """Documents that are told apart by falling positions: a rise by two is no break."""

    def falling(x: Tensor, place: Tensor) -> Tensor:
        breaks = (torch.diff(place, prepend=place[:, :1] - 1, dim=-1) < 0).cumsum(-1)
        same = breaks[:, :, None] == breaks[:, None, :]
        return (same & (place[:, None, :] <= place[:, :, None]))[:, None]

    assert not proven(falling, torch.zeros(3, 7), PLACES).implies_causal


def min_and_padding(x: Tensor, keep: Tensor) -> Tensor:
    allowed = below(x)[None, None] & keep[:, None, None, :].bool()
    return torch.where(allowed, 0.0, FP32_MIN)


def test_finite_fill_needs_an_allowed_key_in_each_row() -> None:
    facts = proven(min_and_padding, torch.zeros(3, 7), KEEP)
    assert facts.finite_fill and not facts.implies_causal and not facts.rows_allow_self
    assert "finite" in facts.reason

    def with_diagonal(x: Tensor, keep: Tensor) -> Tensor:
        row, column = positions(x)
        allowed = (below(x)[None, None] & keep[:, None, None, :].bool()) | (row == column)
        return torch.where(allowed, 0.0, FP32_MIN)

    assert proven(with_diagonal, torch.zeros(3, 7), KEEP).implies_causal


def test_small_negative_number_is_no_fill() -> None:
    facts = proven(lambda x: torch.where(below(x), 0.0, -100.0), torch.zeros(3, 7))
    assert not facts.implies_causal and facts.within_causal


NOT_CAUSAL: list[Callable[[Tensor], Tensor]] = [
    lambda x: positions(x)[1] <= positions(x)[0] + 1,
    lambda x: positions(x)[1] >= positions(x)[0],
    lambda x: positions(x)[1] // 2 <= positions(x)[0] // 2,
    lambda x: below(x) | (positions(x)[1] == 3),
    lambda x: below(x).flip(0),
    lambda x: ~below(x),
    lambda x: positions(x)[0].to(torch.uint8) - positions(x)[1].to(torch.uint8) >= 0,
    lambda x: torch.triu(torch.full((x.shape[1], x.shape[1]), NEG_INF), diagonal=2),
    lambda x: torch.where(below(x), 0.0, NEG_INF) * 0.0,
    lambda x: torch.where(below(x), float("nan"), float("nan")),
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("program", NOT_CAUSAL)
def test_masks_that_look_causal(program: Callable[[Tensor], Tensor], symbolic: bool) -> None:
    assert not proven(program, torch.zeros(3, 7), symbolic=symbolic).implies_causal


def test_always_allowed() -> None:
    row_of_ones = proven(
        lambda x: torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool), torch.zeros(3, 7)
    )
    zeros = proven(lambda x: torch.zeros(x.shape[1], x.shape[1]), torch.zeros(3, 7), symbolic=True)
    assert row_of_ones.always_allowed and zeros.always_allowed


def test_rectangular_masks_do_not_claim_their_diagonal() -> None:
    def program(x: Tensor) -> Tensor:
        row, column = torch.arange(x.shape[1])[:, None], torch.arange(4)
        return torch.where(column <= row, 0.0, FP32_MIN)

    facts = prove_mask(mask_of(traced(program, torch.zeros(3, 7), symbolic=False)))
    assert not facts.rows_allow_self and not facts.implies_causal


def test_in_place_writes_stop_the_proof() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(torch.ops.aten.full.default, ([7, 7], True))
    zeroed = graph.call_function(torch.ops.aten.fill_.Scalar, (ones, False))
    graph.output(ones)
    x.meta["val"] = torch.zeros(3, 7)
    ones.meta["val"] = zeroed.meta["val"] = torch.ones(7, 7, dtype=torch.bool)
    facts = prove_mask(ones)
    assert not facts.always_allowed and "in place" in facts.reason


def test_symbolic_sizes_add_no_guards() -> None:
    gm = traced(packed, torch.zeros(3, 7), PLACES, symbolic=True)
    shape_env = mask_of(gm).meta["val"].shape[-1].node.shape_env
    before = len(shape_env.guards)
    prove_mask(mask_of(gm))
    assert len(shape_env.guards) == before


# ---------------------------------------------------------------------------- random programs

COMPARISONS = [operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne]


@st.composite
def integers(draw: Any, depth: int = 2) -> Callable[[Tensor, Tensor], Tensor]:
    """A program for an integer tensor that broadcasts to ``[L, L]``."""
    kind = draw(st.integers(0, 8 if depth else 3))
    if kind == 0:
        return lambda x, data: torch.arange(x.shape[1])[:, None]
    if kind == 1:
        return lambda x, data: torch.arange(x.shape[1])[None, :]
    if kind == 2:
        return lambda x, data: data[None, :]
    if kind == 3:
        number = draw(st.integers(-3, 8))
        return lambda x, data: torch.full((1, 1), number)
    first, second = draw(integers(depth - 1)), draw(integers(depth - 1))
    number = draw(st.integers(1, 4))
    if kind == 4:
        return lambda x, data: first(x, data) + second(x, data)
    if kind == 5:
        return lambda x, data: first(x, data) - second(x, data)
    if kind == 6:
        return lambda x, data: first(x, data) // number
    if kind == 7:
        return lambda x, data: (first(x, data) % number).to(torch.int32)
    return lambda x, data: torch.minimum(first(x, data), second(x, data)).abs() * number


@st.composite
def masks(draw: Any, depth: int = 3) -> Callable[[Tensor, Tensor], Tensor]:
    """A program for a boolean ``[L, L]`` mask."""
    kind = draw(st.integers(0, 9 if depth else 1))
    if kind == 0:
        return lambda x, data: below(x)
    if kind == 1:
        compare = draw(st.sampled_from(COMPARISONS))
        left, right = draw(integers()), draw(integers())
        return lambda x, data: compare(left(x, data), right(x, data)).expand(x.shape[1], x.shape[1])
    first, second = draw(masks(depth - 1)), draw(masks(depth - 1))
    number = draw(st.integers(-3, 3))
    if kind == 2:
        return lambda x, data: first(x, data) & second(x, data)
    if kind == 3:
        return lambda x, data: first(x, data) | second(x, data)
    if kind == 4:
        return lambda x, data: ~first(x, data)
    if kind == 5:
        return lambda x, data: torch.tril(first(x, data), number)
    if kind == 6:
        return lambda x, data: torch.cat([first(x, data)[:3], second(x, data)[3:]])
    if kind == 7:
        return lambda x, data: torch.nn.functional.pad(first(x, data)[1:, 1:], (1, 0, 1, 0))
    if kind == 8:
        return lambda x, data: first(x, data).flip(0).T.flip(0)
    return lambda x, data: torch.where(first(x, data), second(x, data), below(x))


@st.composite
def biases(draw: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A program for an additive ``[L, L]`` mask."""
    mask, other = draw(masks()), draw(masks(1))
    fill = draw(st.sampled_from([NEG_INF, FP32_MIN, -1e9, -1.0, 0.0]))
    second_fill = draw(st.sampled_from([NEG_INF, FP32_MIN, 0.5, 0.0]))

    def program(x: Tensor, data: Tensor) -> Tensor:
        bias = torch.where(mask(x, data), 0.0, fill)
        return bias + torch.zeros(x.shape[1], x.shape[1]).masked_fill(other(x, data), second_fill)

    return program


def check_random(program: Callable[[Tensor, Tensor], Tensor], symbolic: bool) -> MaskFacts:
    """Trace once, then check the claims on several lengths (if symbolic) and data."""
    trace_data = torch.arange(7)
    gm = traced(program, torch.zeros(2, 7), trace_data, symbolic=symbolic)
    facts = prove_mask(mask_of(gm))
    generator = torch.Generator().manual_seed(0)
    for length in (7, 5, 9) if symbolic else (7, 7, 7):
        data = torch.randint(-2, 9, (length,), generator=generator)
        check_facts(facts, program(torch.zeros(2, length), data), length)
    return facts


SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@SETTINGS
@given(masks(), st.booleans())
def test_random_masks(program: Callable[[Tensor, Tensor], Tensor], symbolic: bool) -> None:
    check_random(program, symbolic)


@SETTINGS
@given(biases(), st.booleans())
def test_random_biases(program: Callable[[Tensor, Tensor], Tensor], symbolic: bool) -> None:
    check_random(program, symbolic)


# -------------------------------------------------------------------------- masks as constants


@pytest.mark.parametrize("program", [*EXACTLY_CAUSAL, window_of_three, in_blocks, *NOT_CAUSAL[:5]])
@pytest.mark.parametrize("rows", [3, 256])
def test_constant_facts_are_those_of_the_numbers(
    program: Callable[[Tensor], Tensor], rows: int
) -> None:
    x = torch.zeros(3, 7)
    mask = program(x)
    facts = constant_facts(mask, rows=rows)
    check_facts(facts, mask, 7)
    traced_facts = proven(program, x)
    for name in ("implies_causal", "exactly_causal", "within_causal", "rows_allow_self"):
        assert getattr(facts, name) >= getattr(traced_facts, name), name


def test_constant_facts_of_a_finite_fill_without_a_key() -> None:
    mask = torch.full((4, 4), FP32_MIN)
    assert not constant_facts(mask).implies_causal
    assert constant_facts(torch.full((4, 4), NEG_INF)).implies_causal


def test_constant_facts_refuse_other_tensors() -> None:
    with pytest.raises(ValueError, match="mask is a boolean or floating-point tensor"):
        constant_facts(torch.zeros(4, 4, dtype=torch.int64))

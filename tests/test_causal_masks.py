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
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import streambp_fx.ops.attention  # noqa: F401  (defines the ops)
from streambp_fx._torch import select_decomp_table
from streambp_fx.passes.causal_masks import simplify_causal_masks
from streambp_fx.passes.mask_algebra import (
    Atom,
    Linear,
    at_least_zero,
    floor_divide,
    infeasible,
    unsatisfiable,
)
from streambp_fx.passes.mask_facts import FINITE_FILL, MaskFacts, constant_facts, prove_mask
from streambp_fx.passes.mask_values import rounded

NEG_INF = float("-inf")
FP32_MIN = torch.finfo(torch.float32).min

ATTENTION = torch.ops.streambp.attention.default
ATTENTION_BACKWARD = torch.ops.streambp.attention_backward.default


# ------------------------------------------------------------------------------- brute force


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
        allowed, plain = ~(mask <= FINITE_FILL), mask == 0
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
    if mask.dtype != torch.bool and not facts.finite_fill:
        assert not ((mask <= FINITE_FILL) & mask.isfinite()).any()


def traced(program: Callable[..., Tensor], *inputs: Tensor, symbolic: bool) -> GraphModule:
    mode = "symbolic" if symbolic else "fake"
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


# --------------------------------------------------------------------------- written programs


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


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("program", EXACTLY_CAUSAL)
def test_causal_masks_are_proven_exactly(program: Callable[[Tensor], Tensor], symbolic: bool):
    facts = proven(program, torch.zeros(3, 7), symbolic=symbolic)
    assert facts.exactly_causal and facts.rows_allow_self, facts.reason
    assert not facts.always_allowed


def window_of_three(x: Tensor) -> Tensor:
    row, column = positions(x)
    return (column <= row) & (column > row - 3)


def window_by_distance(x: Tensor) -> Tensor:
    row, column = positions(x)
    return ((row - column).abs() < 3) & ~(column > row)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("program", [window_of_three, window_by_distance])
def test_windows(program: Callable[[Tensor], Tensor], symbolic: bool):
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
):
    facts = proven(program, torch.zeros(3, 7), data, symbolic=symbolic)
    assert facts.implies_causal and not facts.exactly_causal
    assert facts.rows_allow_self == allows_self or program is sloped
    assert "data" in facts.reason or program is sloped


def test_blocks_are_a_window():
    facts = proven(in_blocks, torch.zeros(3, 7), symbolic=True)
    assert facts.implies_causal and facts.window == 3 and facts.rows_allow_self
    assert not facts.exactly_window_causal


def test_documents_told_by_other_breaks_are_not_proven():
    """Documents that are told apart by falling positions: a rise by two is no break."""

    def falling(x: Tensor, place: Tensor) -> Tensor:
        breaks = (torch.diff(place, prepend=place[:, :1] - 1, dim=-1) < 0).cumsum(-1)
        same = breaks[:, :, None] == breaks[:, None, :]
        return (same & (place[:, None, :] <= place[:, :, None]))[:, None]

    assert not proven(falling, torch.zeros(3, 7), PLACES).implies_causal


def min_and_padding(x: Tensor, keep: Tensor) -> Tensor:
    allowed = below(x)[None, None] & keep[:, None, None, :].bool()
    return torch.where(allowed, 0.0, FP32_MIN)


def test_finite_fill_needs_an_allowed_key_in_each_row():
    facts = proven(min_and_padding, torch.zeros(3, 7), KEEP)
    assert facts.finite_fill and not facts.implies_causal and not facts.rows_allow_self
    assert "finite" in facts.reason

    def with_diagonal(x: Tensor, keep: Tensor) -> Tensor:
        row, column = positions(x)
        allowed = (below(x)[None, None] & keep[:, None, None, :].bool()) | (row == column)
        return torch.where(allowed, 0.0, FP32_MIN)

    assert proven(with_diagonal, torch.zeros(3, 7), KEEP).implies_causal


def test_small_negative_number_is_no_fill():
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
def test_masks_that_look_causal(program: Callable[[Tensor], Tensor], symbolic: bool):
    assert not proven(program, torch.zeros(3, 7), symbolic=symbolic).implies_causal


def test_always_allowed():
    row_of_ones = proven(
        lambda x: torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool), torch.zeros(3, 7)
    )
    zeros = proven(lambda x: torch.zeros(x.shape[1], x.shape[1]), torch.zeros(3, 7), symbolic=True)
    assert row_of_ones.always_allowed and zeros.always_allowed


def test_rectangular_masks_do_not_claim_their_diagonal():
    def program(x: Tensor) -> Tensor:
        row, column = torch.arange(x.shape[1])[:, None], torch.arange(4)
        return torch.where(column <= row, 0.0, FP32_MIN)

    facts = prove_mask(mask_of(traced(program, torch.zeros(3, 7), symbolic=False)))
    assert not facts.rows_allow_self and not facts.implies_causal


def test_in_place_writes_stop_the_proof():
    graph = Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(torch.ops.aten.full.default, ([7, 7], True))
    zeroed = graph.call_function(torch.ops.aten.fill_.Scalar, (ones, False))
    graph.output(ones)
    x.meta["val"] = torch.zeros(3, 7)
    ones.meta["val"] = zeroed.meta["val"] = torch.ones(7, 7, dtype=torch.bool)
    facts = prove_mask(ones)
    assert not facts.always_allowed and "in place" in facts.reason


def test_symbolic_sizes_add_no_guards():
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
def test_random_masks(program: Callable[[Tensor, Tensor], Tensor], symbolic: bool):
    check_random(program, symbolic)


@SETTINGS
@given(biases(), st.booleans())
def test_random_biases(program: Callable[[Tensor, Tensor], Tensor], symbolic: bool):
    check_random(program, symbolic)


# ------------------------------------------------------------------------------- the algebra


@SETTINGS
@given(st.data())
def test_infeasible_systems_have_no_solution(data: st.DataObject):
    atoms = [Atom(name, low=0, high=Linear.of(6)) for name in "xyz"]
    factor = st.integers(-3, 3)
    system = [
        sum(
            (Linear.of(a) * data.draw(factor) for a in atoms),
            Linear.of(data.draw(st.integers(-9, 9))),
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    grid = torch.cartesian_prod(*[torch.arange(7)] * 3)
    holds = torch.ones(len(grid), dtype=torch.bool)
    for expression in system:
        factors = torch.tensor([expression.terms.get(atom, 0) for atom in atoms])
        holds &= (grid @ factors + expression.const) >= 0
    if infeasible(system):
        assert not holds.any()


@given(st.integers(-20, 20), st.integers(1, 5), st.integers(0, 9), st.integers(-4, 4))
def test_floor_division(constant: int, divisor: int, value: int, factor: int):
    atom = Atom("x", low=0, high=Linear.of(9))
    quotient = floor_divide(Linear.of(atom) * factor + constant, divisor)
    at_value = [at_least_zero(Linear.of(atom) - value), at_least_zero(-Linear.of(atom) + value)]
    expected = (factor * value + constant) // divisor
    assert unsatisfiable(*at_value, at_least_zero(quotient - expected - 1))
    assert unsatisfiable(*at_value, at_least_zero(-quotient + expected - 1))


@given(
    st.floats(width=64, allow_nan=False),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_rounding_is_torchs(value: float, dtype: torch.dtype):
    once = torch.tensor(value, dtype=torch.float64).to(dtype)
    if dtype == torch.float64 or torch.tensor(value, dtype=torch.float32).item() == value:
        assert rounded(value, dtype) == once.item()
    else:  # torch rounds float64 to a half format by way of float32
        assert rounded(value, dtype) == pytest.approx(once.item(), rel=torch.finfo(dtype).eps)


# ----------------------------------------------------------------------------------- the pass


def attention_graph(
    program: Callable[[Tensor], Tensor], causal: bool = False, keys: int | None = None
) -> GraphModule:
    """A graph with two attention calls that share a mask, and the backward of one."""

    def function(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        mask = program(query[:, 0])
        out, lse = ATTENTION(query, key, key, mask, None, causal, 0.5, 0.0)
        again, _ = ATTENTION(out, key, key, mask, None, causal, 0.5, 0.0)
        grads = ATTENTION_BACKWARD(again, query, key, key, mask, None, out, lse, causal, 0.5, 0.0)
        return (again, *grads)

    length = 7
    query = torch.randn(2, 3, length, 4)
    return traced(function, query, torch.randn(2, 3, keys or length, 4), symbolic=False)


def attention_arguments(gm: GraphModule) -> list[tuple[Any, Any]]:
    """(bias, causal) of each call."""
    places = {ATTENTION: (3, 5), ATTENTION_BACKWARD: (4, 8)}
    return [
        (node.args[places[node.target][0]], node.args[places[node.target][1]])
        for node in gm.graph.nodes
        if node.target in places
    ]


def test_exactly_causal_masks_are_replaced_everywhere():
    gm = attention_graph(below)
    inputs = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    before = gm(*inputs)
    reports = simplify_causal_masks(gm)
    assert [report.change for report in reports] == ["replaced by causal"] * 3
    assert attention_arguments(gm) == [(None, True)] * 3
    assert not any(node.target is torch.ops.prims.iota.default for node in gm.graph.nodes)
    torch.testing.assert_close(gm(*inputs), before)


def test_implied_causal_keeps_the_mask_beside_causal():
    gm = attention_graph(window_of_three)
    inputs = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    before = gm(*inputs)
    reports = simplify_causal_masks(gm)
    assert [report.change for report in reports] == ["causal added"] * 3
    assert all(isinstance(bias, Node) and causal for bias, causal in attention_arguments(gm))
    torch.testing.assert_close(gm(*inputs), before)


def test_masks_that_do_nothing_are_removed():
    gm = attention_graph(lambda x: torch.ones(1, 7, dtype=torch.bool))
    assert [report.change for report in simplify_causal_masks(gm)] == ["removed"] * 3
    assert attention_arguments(gm) == [(None, False)] * 3


def test_masks_within_causal_are_removed_beside_causal():
    gm = attention_graph(lambda x: positions(x)[1] <= positions(x)[0] + 1, causal=True)
    assert [report.change for report in simplify_causal_masks(gm)] == ["removed"] * 3
    assert attention_arguments(gm) == [(None, True)] * 3


def test_unproven_masks_are_kept_and_reported():
    gm = attention_graph(lambda x: positions(x)[1] <= positions(x)[0] + 1)
    before = attention_arguments(gm)
    reports = simplify_causal_masks(gm)
    assert attention_arguments(gm) == before
    assert "kept" in str(reports[0]) and reports[0].mask in str(reports[0])


def test_rectangular_attention_is_not_made_causal():
    def program(x: Tensor) -> Tensor:
        return torch.arange(5) <= torch.arange(7)[:, None]

    gm = attention_graph(program, keys=5)
    assert [report.change for report in simplify_causal_masks(gm)] == ["kept"] * 3


# -------------------------------------------------------------------------- masks as constants


@pytest.mark.parametrize("program", [*EXACTLY_CAUSAL, window_of_three, in_blocks, *NOT_CAUSAL[:5]])
@pytest.mark.parametrize("rows", [3, 256])
def test_constant_facts_are_those_of_the_numbers(program: Callable[[Tensor], Tensor], rows: int):
    x = torch.zeros(3, 7)
    mask = program(x)
    facts = constant_facts(mask, rows=rows)
    check_facts(facts, mask, 7)
    traced_facts = proven(program, x)
    for name in ("implies_causal", "exactly_causal", "within_causal", "rows_allow_self"):
        assert getattr(facts, name) >= getattr(traced_facts, name), name


def test_constant_facts_of_a_finite_fill_without_a_key():
    mask = torch.full((4, 4), FP32_MIN)
    assert not constant_facts(mask).implies_causal
    assert constant_facts(torch.full((4, 4), NEG_INF)).implies_causal


def test_constant_facts_refuse_other_tensors():
    with pytest.raises(ValueError, match="mask is a boolean or floating-point tensor"):
        constant_facts(torch.zeros(4, 4, dtype=torch.int64))

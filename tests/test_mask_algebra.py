"""The prover of linear conditions and the rounding of constants, against brute force and torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streambp_fx.passes.mask_algebra import (
    Atom,
    Linear,
    at_least_zero,
    floor_divide,
    infeasible,
    unsatisfiable,
)
from streambp_fx.passes.mask_values import rounded


@settings(deadline=None)
@given(st.data())
def test_infeasible_systems_have_no_solution(data: st.DataObject) -> None:
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
def test_floor_division(constant: int, divisor: int, value: int, factor: int) -> None:
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
def test_rounding_is_torchs(value: float, dtype: torch.dtype) -> None:
    once = torch.tensor(value, dtype=torch.float64).to(dtype)
    if dtype == torch.float64 or torch.tensor(value, dtype=torch.float32).item() == value:
        assert rounded(value, dtype) == once.item()
    else:  # torch rounds float64 to a half format by way of float32
        assert rounded(value, dtype) == pytest.approx(once.item(), rel=torch.finfo(dtype).eps)

"""`extent_change`: slices and pads along the sequence axis itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streambp_fx.passes.extents import ExtentChange, extent_change
from streambp_fx.passes.placement import Extent, Streamed
from tests.joint_graphs import forward_graph, result

T = 6
X = torch.zeros(2, T, 3)


def _change(
    program: Callable[..., Any], *places: Streamed | None, inputs: tuple[Tensor, ...] = (X,)
) -> tuple[Streamed, ExtentChange] | None:
    return extent_change(result(forward_graph(program, *inputs)), list(places))


@pytest.mark.parametrize(
    "part, extent",
    [
        (slice(0, -1), Extent(0, 1)),
        (slice(1, None), Extent(1, 0)),
        (slice(2, -1), Extent(2, 1)),
        (slice(-2, None), Extent(4, 0)),
    ],
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_slice_narrows(part: slice, extent: Extent, symbolic: bool) -> None:
    graph = forward_graph(lambda x: aten_slice(x, part), X, symbolic=symbolic)
    found = extent_change(result(graph), [Streamed(1)])
    if symbolic and part.start == -2:
        return  # covered below: a part counted from the end alone has no constant extent
    assert found == (Streamed(1, extent=extent), ExtentChange(0, extent, None))


def aten_slice(x: Tensor, part: slice) -> Tensor:
    """One slice along dim 1, as one op."""
    start = 0 if part.start is None else part.start
    stop = torch.iinfo(torch.int64).max if part.stop is None else part.stop
    return torch.ops.aten.slice.Tensor(x, 1, start, stop)


def test_slice_of_a_slice_adds_up() -> None:
    at = Streamed(1, extent=Extent(1, 0))
    found = _change(lambda x: aten_slice(x, slice(1, -1)), at, inputs=(X[:, 1:],))
    assert found is not None and found[0].extent == Extent(2, 1)


def test_last_tokens_of_a_symbolic_length_are_no_extent() -> None:
    graph = forward_graph(lambda x: x[:, -2:], X, symbolic=True)
    found = extent_change(result(graph), [Streamed(1)])
    assert found is None or found[0].extent.hi == 0


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.ops.aten.slice.Tensor(x, 2, 0, 2),  # another dim
        lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, T, 2),  # every other token
        lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, T),  # all of it
        lambda x: x * 2,
        lambda x: F.pad(x, (1, 0)),  # another dim
        lambda x: F.pad(x, (1, 0, 1, 0)),  # another dim as well
    ],
)
def test_others_change_no_extent(program: Callable[[Tensor], Tensor]) -> None:
    assert _change(program, Streamed(1)) is None


def test_factor_of_a_merged_dim_is_not_sliced() -> None:
    merged = X.flatten(0, 1)
    program = lambda x: torch.ops.aten.slice.Tensor(x, 0, 0, 3)  # noqa: E731
    assert _change(program, Streamed(0, outer=2), inputs=(merged,)) is None


def test_pad_widens_a_narrow_extent() -> None:
    at = Streamed(1, extent=Extent(1, 1))
    found = _change(lambda x: F.pad(x, (0, 0, 1, 0), value=-100.0), at, inputs=(X[:, 1:-1],))
    extent = Extent(0, 1)
    assert found == (Streamed(1, extent=extent), ExtentChange(0, extent, -100.0))


def test_pad_beyond_the_sequence_is_refused() -> None:
    assert _change(lambda x: F.pad(x, (0, 0, 0, 1)), Streamed(1)) is None


def test_slice_scatter_into_zeros_is_a_pad() -> None:
    def program(part: Tensor) -> Tensor:
        zeros = torch.ops.aten.full.default([2, T, 3], 0)
        return torch.ops.aten.slice_scatter.default(zeros, part, 1, 0, -1)

    at = Streamed(1, extent=Extent(0, 1))
    found = _change(program, None, at, inputs=(X[:, :-1],))
    assert found == (Streamed(1), ExtentChange(1, Extent(), 0.0))


def test_slice_scatter_into_other_values_is_refused() -> None:
    program = lambda x, part: torch.ops.aten.slice_scatter.default(x, part, 1, 0, -1)  # noqa: E731
    at = Streamed(1, extent=Extent(0, 1))
    assert _change(program, Streamed(1), at, inputs=(X, X[:, :-1])) is None

"""`run_loop`: how operands go into a loop's body and results come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from streambp_fx.passes.loops import (
    Along,
    LoopSpec,
    Operand,
    Place,
    Result,
    chunk_bounds,
    local_range,
    run_loop,
    streambp_loop,
)
from streambp_fx.passes.placement import FULL, Extent

WITHOUT_LAST = Extent(0, 1)
WITHOUT_FIRST = Extent(1, 0)


def _spec(
    operands: list[Operand],
    results: list[Result],
    chunk_size: int,
    descending: bool = False,
    extents: tuple[Extent, ...] = (FULL,),
) -> LoopSpec:
    return LoopSpec(Place(0), extents, tuple(operands), tuple(results), chunk_size, descending)


def _values(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@given(st.integers(0, 40), st.integers(1, 50), st.booleans())
def test_chunks_tile_the_sequence_and_are_balanced(
    length: int, size: int, descending: bool
) -> None:
    bounds = list(chunk_bounds(length, size, descending))
    ascending = bounds[::-1] if descending else bounds
    assert [i for start, end in ascending for i in range(start, end)] == list(range(length))
    sizes = {end - start for start, end in bounds}
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
    assert len(bounds) == max(1, -(-length // size))


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2), st.integers(0, 2))
def test_extents_are_tiled_as_well(length: int, size: int, lo: int, hi: int) -> None:
    if lo + hi > length:
        return
    covered: list[int] = []
    for start, end in chunk_bounds(length, size, False):
        offset, count = local_range(Extent(lo, hi), length, start, end)
        positions = range(lo + offset, lo + offset + count)
        assert count == 0 or (start <= positions[0] and positions[-1] < end)
        covered += positions
    assert covered == list(range(lo, length - hi))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 9])
@pytest.mark.parametrize(
    "along, shape",
    [
        (Along(1, 1, FULL), (2, 7, 3)),
        (Along(0, 1, FULL), (7, 2)),
        (Along(0, 1, FULL), (2 * 7, 3)),  # rows of a batch of two
        (Along(0, 3, FULL), (2 * 7 * 3,)),
        (Along(2, 4, FULL), (2, 3, 7 * 4)),
    ],
)
def test_chunk_and_concat_undo_each_other(
    along: Along, shape: tuple[int, ...], chunk_size: int, descending: bool
) -> None:
    value = _values(*shape)
    seen: list[int] = []

    def body(offset: int, size: int, chunk: Tensor) -> list[Tensor]:
        assert chunk.is_contiguous() and chunk.numel() == size * value.numel() // 7
        seen.append(offset)
        return [chunk + 1]

    spec = _spec([Operand(along)], [Result(along)], chunk_size, descending)
    (result,) = run_loop(body, spec, 7, [value])
    assert_close(result, value + 1)
    assert seen == sorted(seen, reverse=descending) and len(seen) == -(-7 // chunk_size)


@pytest.mark.parametrize("chunk_size", [1, 2, 6])
def test_chunk_of_a_merged_dim_has_the_same_tokens_of_each_row(chunk_size: int) -> None:
    merged, split = Along(0, 1, FULL), Along(1, 1, FULL)
    value = _values(2, 6, 3)

    def body(offset: int, size: int, rows: Tensor, same: Tensor) -> list[Tensor]:
        return [rows.view(2, size, 3) - same]

    spec = _spec([Operand(merged), Operand(split)], [Result(split)], chunk_size)
    (result,) = run_loop(body, spec, 6, [value.view(12, 3), value])
    assert_close(result, torch.zeros_like(value))


def test_whole_operands_and_sizes_are_passed_as_they_are() -> None:
    weight = _values(3, 3)

    def body(offset: int, size: int, x: Tensor, w: Tensor, number: int) -> list[Tensor]:
        assert w is weight and number == 5
        return [x @ w]

    along = Along(0, 1, FULL)
    spec = _spec([Operand(along), Operand(), Operand()], [Result(along)], 2)
    x = _values(5, 3)
    (result,) = run_loop(body, spec, 5, [x, weight, 5])
    assert_close(result, x @ weight)


@pytest.mark.parametrize("dtype, result", [(None, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_sums_are_cast_as_the_loop_ends(dtype: torch.dtype | None, result: torch.dtype) -> None:
    x = torch.rand(7, 3).bfloat16()

    def body(offset: int, size: int, x: Tensor, total: Tensor) -> list[Tensor]:
        total += x.float().sum(0)
        return [x * 2]

    along = Along(0, 1, FULL)
    spec = _spec(
        [Operand(along), Operand(mutated=True)], [Result(buffer=1, dtype=dtype), Result(along)], 2
    )
    total, doubled = run_loop(body, spec, 7, [x, torch.zeros(3)])
    assert total.dtype is result
    assert_close(total, x.float().sum(0).to(result))
    assert_close(doubled, x * 2)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 6])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("extent", [WITHOUT_LAST, WITHOUT_FIRST])
def test_parts_of_the_sequence(
    extent: Extent, batch: int, chunk_size: int, descending: bool
) -> None:
    # The first or the last chunk may have nothing inside the part.
    value = _values(batch * 5, 2)
    along = Along(0, 1, extent)

    def body(o: int, s: int, offset: int, size: int, chunk: Tensor) -> list[Tensor]:
        assert chunk.shape == (batch * size, 2)
        return [chunk + 1]

    spec = _spec([Operand(along)], [Result(along)], chunk_size, descending, (FULL, extent))
    (result,) = run_loop(body, spec, 6, [value])
    assert_close(result, value + 1)


def test_result_of_an_empty_sequence_keeps_its_shape() -> None:
    along = Along(1, 1, FULL)
    spec = _spec([], [Result(along)], 4)
    (result,) = run_loop(lambda offset, size: [torch.ones(2, size, 3)], spec, 0, [])
    assert result.shape == (2, 0, 3)


def test_number_of_operands_is_checked() -> None:
    spec = _spec([Operand()], [], 2)
    with pytest.raises(ValueError, match="zip"):
        run_loop(lambda *inputs: [], spec, 3, [])


def test_loop_node_runs_its_bodys_spec() -> None:
    @dataclasses.dataclass
    class Body:
        spec: LoopSpec
        call: Callable[..., Any]

        def __call__(self, *inputs: Any) -> Any:
            return self.call(*inputs)

    along = Along(0, 1, FULL)
    body = Body(_spec([Operand(along)], [Result(along)], 2), lambda o, s, x: [x * 2])
    x = _values(5, 2)
    (result,) = streambp_loop(body, 5, x)
    assert_close(result, x * 2)

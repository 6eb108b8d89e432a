"""Sums of bfloat16 products on the CPU: fp32 throughout, on machines with and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor

from streambp_fx._torch import FakeTensor, FakeTensorMode, TorchDispatchMode
from streambp_fx.measure import memory_use
from streambp_fx.ops import narrow_products
from streambp_fx.ops.accumulate import accumulate_mm_
from streambp_fx.ops.narrow_products import add_narrow_product, is_narrow_product
from tests.marks import slow_but

BF16 = torch.bfloat16
ROOT = Path(__file__).parent.parent
SHAPES = [(64, 256, 32), (100, 70, 33), (5, 3, 1), (1, 1, 2), (257, 513, 777), (130, 1, 64)]
needs_narrow_products = pytest.mark.skipif(
    "not has_narrow_products()", reason="no bfloat16 products on this CPU"
)


def has_narrow_products() -> bool:
    return is_narrow_product(torch.ones(1, 1), *[torch.ones(1, 1, dtype=BF16)] * 2)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(source: str) -> None:
        raise RuntimeError("no compiler")

    narrow_products._library.cache_clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr(narrow_products.CppCodeCache, "load", fail)
    yield
    narrow_products._library.cache_clear()


def operands(m: int, n: int, k: int, transposed: bool, *batch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(m + n + k)
    left = torch.randn(*batch, *((k, m) if transposed else (m, k)), generator=generator).to(BF16)
    right = torch.randn(*batch, *((n, k) if transposed else (k, n)), generator=generator).to(BF16)
    total = torch.randn(*batch, m, n, generator=generator)
    return total, *((left.mT, right.mT) if transposed else (left, right))


def error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_keep_fp32_precision(shape: tuple[int, int, int], transposed: bool) -> None:
    total, left, right = operands(*shape, transposed)
    expected = total.double() + left.double() @ right.double()
    accumulate_mm_(total, left, right)
    assert error(total, expected) < 1e-6  # bfloat16 results would be off by about 2e-3


@pytest.mark.parametrize("transposed", [False, True])
def test_batched_sums(transposed: bool) -> None:
    total, left, right = operands(70, 40, 9, transposed, 3)
    expected = total.double() + left.double() @ right.double()
    accumulate_mm_(total, left, right)
    assert error(total, expected) < 1e-6


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(700, 900, 65), (70, 1500, 3), (9, 9, 9)])
def test_threads_share_a_sum(shape: tuple[int, int, int], threads: int) -> None:
    total, left, right = operands(*shape, transposed=True)
    expected = total.double() + left.double() @ right.double()
    accumulate_mm_(total, left, right)
    assert error(total, expected) < 1e-6


@needs_narrow_products
def test_depths_that_vary_need_few_kernels() -> None:
    depths = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.streambp.add_narrow_product_.default:
                depths.add(2 * args[2].shape[0])
            return func(*args, **(kwargs or {}))

    with Watch():
        for depth in range(1, 130):
            add_narrow_product(*operands(5, 3, depth, transposed=True))
    assert depths == {64, 128, 192}


def test_a_row_seen_as_a_column_is_summed_too() -> None:
    row = torch.zeros(5, 1).t()
    accumulate_mm_(row, torch.ones(1, 4, dtype=BF16), torch.ones(4, 5, dtype=BF16))
    assert torch.equal(row, torch.full((1, 5), 4.0))


def test_a_part_of_the_sum_is_added_to_in_place() -> None:
    whole = torch.zeros(90, 50)
    _, left, right = operands(80, 30, 10, transposed=False)
    accumulate_mm_(whole[5:85, 10:40], left, right)
    expected = torch.zeros(90, 50, dtype=torch.float64)
    expected[5:85, 10:40] = left.double() @ right.double()
    assert error(whole, expected) < 1e-6 and not whole[:5].any() and not whole[:, :10].any()


def test_without_a_compiler_the_sums_are_the_same_and_it_is_said(
    no_compiler: None,
) -> None:
    total, left, right = operands(100, 70, 33, transposed=True)
    expected = total.double() + left.double() @ right.double()
    with TestCase().assertLogs("streambp_fx", "WARNING") as logged:
        accumulate_mm_(total, left, right)
        accumulate_mm_(torch.zeros_like(total), left, right)
    assert error(total, expected) < 1e-6
    (line,) = logged.output
    assert "bfloat16" in line and "no compiler" in line


@needs_narrow_products
def test_fake_tensors_are_taken_too() -> None:
    """A memory prediction runs the sums of a body on them."""
    with FakeTensorMode() as mode:
        total = torch.empty(100, 70)
        left, right = torch.empty(100, 33, dtype=BF16), torch.empty(33, 70, dtype=BF16)
        assert is_narrow_product(total, left, right)
        accumulate_mm_(total, left, right)
    assert isinstance(total, FakeTensor) and total.fake_mode is mode


def test_without_onednn_the_sums_are_the_same() -> None:
    total, left, right = operands(100, 70, 33, transposed=True)
    expected = total.double() + left.double() @ right.double()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not has_narrow_products()
        accumulate_mm_(total, left, right)
    assert error(total, expected) < 1e-6


@needs_narrow_products
def test_a_product_that_fails_says_why() -> None:
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(RuntimeError, match="Brgemm"):
        add_narrow_product(*operands(100, 70, 33, transposed=True))


@pytest.mark.parametrize(
    "isa",
    slow_but(
        ["AVX2", "AVX512_CORE_AMX"], ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX"]
    ),
)
def test_older_cpus(isa: str) -> None:
    """oneDNN can be told to use no later instructions than those."""
    program = (
        "from tests.test_narrow_products import *;"
        "total, left, right = operands(100, 70, 33, transposed=True);"
        "expected = total.double() + left.double() @ right.double();"
        "accumulate_mm_(total, left, right); assert error(total, expected) < 1e-6"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@needs_narrow_products
def test_the_workspace_is_less_than_an_upcast_operand() -> None:
    total, left, right = operands(8000, 256, 512, transposed=True)
    workspace = 2 * right.numel()
    peak = memory_use(lambda: add_narrow_product(total, left, right), "cpu").peak
    assert peak <= workspace + 2**16 < 4 * left.numel()


@pytest.mark.parametrize(
    ("total", "left", "right"),
    [
        (torch.float64, BF16, BF16),
        (torch.float32, BF16, torch.float32),
        (torch.float32, torch.float16, torch.float16),
    ],
)
def test_other_dtypes_are_summed_too(
    total: torch.dtype, left: torch.dtype, right: torch.dtype
) -> None:
    sums = torch.zeros(3, 5, dtype=total)
    one, other = torch.ones(3, 4, dtype=left), torch.ones(4, 5, dtype=right)
    assert not is_narrow_product(sums, one, other)
    accumulate_mm_(sums, one, other)
    assert torch.equal(sums, torch.full((3, 5), 4.0, dtype=total))

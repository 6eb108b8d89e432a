"""`decompositions`: what they spell out is right, in narrow dtypes too, and can be run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.decompositions import decompositions
from tests.joint_graphs import assert_same_results, aten, calls, capture

MEAN = decompositions()[aten.mean.dim]


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}),
        (([],), {}),
        (([1],), {}),
        (([-1, 0],), {}),
        (([1], True), {}),
        (([2],), {"dtype": torch.float64}),
    ],
)
def test_mean_is_torchs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    value = torch.randn(2, 5, 3)
    expected = aten.mean.dim(value, *(args or ([],)), **kwargs)
    torch.testing.assert_close(MEAN(value, *args, **kwargs), expected)


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.empty(2, 0), torch.tensor([1j, 3j])])
def test_mean_of_odd_inputs(value: Tensor) -> None:
    torch.testing.assert_close(MEAN(value), value.mean(), equal_nan=True)


def test_sum_of_fp16_values_does_not_overflow() -> None:
    value = torch.full((70_000,), 2.0, dtype=torch.float16)
    assert MEAN(value).dtype is torch.float16 and MEAN(value) == 2.0


@pytest.mark.parametrize("dynamic", [False, True])
def test_mean_over_tokens_is_streamed(dynamic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(31, 8, dtype=torch.float64))
    captured = capture(
        lambda x, w: F.linear(x.sin(), w).square().mean(),
        x,
        w,
        dynamic=[(0, 1)] if dynamic else [],
    )
    assert not calls(captured.graph_module.graph, aten.mean.default)
    assert_same_results(captured.rewrite(), captured)  # which fails where there is a barrier


@pytest.mark.parametrize("sizes", [(300,), (3, 5), (5, 0)])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bool])
def test_eye_counts_in_a_dtype_that_runs_on_cpu(
    sizes: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    spelled = decompositions()[aten.eye.m if len(sizes) == 2 else aten.eye.default]
    graph = make_fx(lambda: spelled(*sizes, dtype=dtype), decompositions())()
    torch.testing.assert_close(graph(), torch.eye(*sizes, dtype=dtype))

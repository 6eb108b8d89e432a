"""`compare_one_hots`: one value a line, scattered into a constant, becomes a comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streambp_fx.passes.one_hot import SCATTERS, compare_one_hots
from tests.backend import last_report, needs_report, streamed
from tests.joint_graphs import calls, capture, run_graph

aten = torch.ops.aten
LABELS = torch.tensor([[4, 0, 6], [2, 2, 5]])


def one_hot(x: Tensor, labels: Tensor) -> Tensor:
    return x * torch.zeros(2, 3, 7, dtype=x.dtype).scatter(-1, labels[..., None], 1.5)


def middle_dim(x: Tensor, labels: Tensor) -> Tensor:
    return x * torch.full((2, 7, 3), -2.0, dtype=x.dtype).scatter(1, labels[:, None], 0.5).mT


def cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=2)


def gathered(x: Tensor, labels: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, labels[..., None]).square()


def gathered_along_the_middle(x: Tensor, labels: Tensor) -> Tensor:
    return x.mT.sin().gather(1, labels[:, None]).square()


def values(x: Tensor, labels: Tensor) -> Tensor:
    source = x.sum(-1, keepdim=True)
    return torch.full((2, 3, 7), 2.0, dtype=x.dtype).scatter(-1, labels[..., None], source)


def zeros_like(x: Tensor, labels: Tensor) -> Tensor:
    return x * torch.zeros_like(x).scatter(-1, labels[..., None], 2.5)


def two_places(x: Tensor, labels: Tensor) -> Tensor:
    index = torch.stack([labels, labels.flip(0)], -1)
    return x * torch.zeros(2, 3, 7, dtype=x.dtype).scatter(-1, index, 1.0)


def two_gathered(x: Tensor, labels: Tensor) -> Tensor:
    index = torch.stack([labels, labels.flip(0)], -1)
    return x.exp().gather(-1, index).square()


def part_of_the_values(x: Tensor, labels: Tensor) -> Tensor:
    zeros = torch.zeros(2, 3, 7, dtype=x.dtype)
    return x * zeros.scatter(-1, labels[..., None], x.detach().exp())


def added_to_ones(x: Tensor, labels: Tensor) -> Tensor:
    ones = torch.ones(2, 3, 7, dtype=x.dtype)
    return ones.scatter_add(-1, labels[..., None], x[..., :1].exp())


def into_values(x: Tensor, labels: Tensor) -> Tensor:
    return x.scatter(-1, labels[..., None], 1.0)


def some_rows(x: Tensor, labels: Tensor) -> Tensor:
    return x * torch.zeros(2, 3, 7, dtype=x.dtype).scatter(-1, labels[:, :2, None], 1.0)


def rewritten(program: Callable[..., Tensor]) -> tuple[Any, int]:
    """The joint graph after the pass, which computes the same, and its number of scatters."""
    x = torch.linspace(-1.0, 2.0, 42, dtype=torch.float64).view(2, 3, 7).requires_grad_()
    captured = capture(lambda x, labels: program(x, labels).sum(), x, LABELS)
    module = captured.graph_module
    right = run_graph(module, captured.inputs())
    compare_one_hots(module)
    module.graph.lint()
    left = run_graph(module, captured.inputs())
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    return module.graph, sum(len(calls(module.graph, target)) for target in SCATTERS)


@pytest.mark.parametrize(
    "program",
    [one_hot, middle_dim, cross_entropy, gathered, gathered_along_the_middle, values, zeros_like],
)
def test_becomes_a_comparison(program: Callable[..., Tensor]) -> None:
    graph, scatters = rewritten(program)
    assert scatters == 0
    assert calls(graph, aten.eq.Tensor)
    chosen = [node.meta["val"] for node in calls(graph, aten.where.self)]
    assert any(7 in value.shape and value.dtype == torch.float64 for value in chosen)


@pytest.mark.parametrize(
    "program",
    [two_places, into_values, some_rows, two_gathered, part_of_the_values, added_to_ones],
)
def test_other_scatters_stay(program: Callable[..., Tensor]) -> None:
    _, scatters = rewritten(program)
    assert scatters >= 1


def length_in_zeros(x: Tensor, labels: Tensor) -> Tensor:
    zeros = torch.zeros(*x.shape[:2], 7, dtype=x.dtype)
    return x * zeros.scatter(-1, labels[..., None], x.shape[1])


def one_in_lengths(x: Tensor, labels: Tensor) -> Tensor:
    lengths = torch.full((*x.shape[:2], 7), x.shape[1], dtype=x.dtype)
    return x * lengths.scatter(-1, labels[..., None], 1.0)


def part_in_values(x: Tensor, labels: Tensor) -> Tensor:
    return x.sin().scatter(-1, labels[..., None], 1 / x.shape[1])


def part_in_zeros(x: Tensor, labels: Tensor) -> Tensor:
    return x * torch.zeros_like(x).scatter(-1, labels[..., None], 1 / x.shape[1])


@needs_report
@pytest.mark.parametrize("compile_bodies", [False, True])
@pytest.mark.parametrize(
    "program", [length_in_zeros, one_in_lengths, part_in_zeros, part_in_values]
)
def test_numbers_computed_from_sizes(program: Callable[..., Tensor], compile_bodies: bool) -> None:
    compiled = streamed(program, dynamic=True, chunk_size=8, compile_bodies=compile_bodies)
    for length in (21, 34):
        x = torch.randn(2, length, 7, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(0, 7, (2, length))
        torch.testing.assert_close(compiled(x, labels), program(x, labels))
        assert not last_report().problems()

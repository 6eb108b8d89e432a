"""Products of tokens with tokens: which dim is streamed, what is needed whole, what is a sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streambp_fx.passes.axes import Kind, find_axes
from streambp_fx.passes.dataflow import descendants
from streambp_fx.passes.placement import Extent, Streamed
from tests.joint_graphs import aten, axes_of, calls, forward_graph, only, result

B, T, D = 2, 5, 3
X = torch.zeros(B, T, D)


def test_scores_take_rows_of_the_queries_and_all_keys() -> None:
    graph = forward_graph(lambda q, k: q @ k.mT, X, X)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    scores = only(graph, aten.bmm.default)
    assert axes.position(scores) == Streamed(1)
    assert axes.columns[scores] == Streamed(2)
    assert axes.step[scores].whole == {scores.args[1]}
    assert axes.attends(scores) and not axes.barriers


@pytest.mark.parametrize("dim, rows", [(-1, 1), (-2, 2)])
@pytest.mark.parametrize(
    "mix",
    [
        lambda scores, dim: scores.softmax(dim),
        lambda scores, dim: (scores / 2).tanh().sum(dim),
        lambda scores, dim: (scores / 2).topk(2, dim)[0],
        lambda scores, dim: scores.exp().transpose(1, 2).amax(-3 - dim),
    ],
)
def test_rows_are_the_dim_that_nothing_mixes(
    mix: Callable[[Tensor, int], Tensor], dim: int, rows: int
) -> None:
    graph = forward_graph(lambda q, k: mix(q @ k.mT, dim), X, X)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    assert axes.position(only(graph, aten.bmm.default)) == Streamed(rows)
    assert not axes.barriers and axes.in_loop(result(graph))


def test_weights_take_all_values_and_make_rows_of_the_queries() -> None:
    graph = forward_graph(lambda q, k, v: (q @ k.mT).tanh() @ v, X, X, X)
    axes = axes_of(graph, *[Streamed(1)] * 3, length=T)
    scores, output = calls(graph, aten.bmm.default)
    assert axes.step[output].whole == {output.args[1]}
    assert axes.position(output) == Streamed(1)
    assert output not in axes.columns and not axes.attends(output)
    assert axes.attends(scores)


def test_gradient_of_the_keys_is_a_sum_that_has_the_sequence_axis() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        scores = (q @ k.mT).softmax(-1)
        return (scores.mT @ q) * 2

    graph = forward_graph(program, X, X)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    sums = calls(graph, aten.bmm.default)[1]
    assert axes.kind[sums] is Kind.SUM and axes.position(sums) == Streamed(1)
    assert axes.kind[result(graph)] is Kind.STREAMED


def test_rows_follow_those_of_a_product_that_is_met_later() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        return ((k @ q.mT).tanh().mT * weights).sum(-1)

    graph = forward_graph(program, X, X)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    first, second = calls(graph, aten.bmm.default)
    assert axes.position(first) == Streamed(1) and axes.position(second) == Streamed(2)
    assert not axes.barriers


def test_sums_of_pairs_are_such_products_too() -> None:
    def program(x: Tensor) -> Tensor:
        return (x[:, :, None, 0] - x[:, None, :, 1]).exp().sum(-1)

    graph = forward_graph(program, X)
    axes = axes_of(graph, Streamed(1), length=T)
    pairs = only(graph, aten.sub.Tensor)
    assert axes.position(pairs) == Streamed(1) and axes.columns[pairs] == Streamed(2)
    assert axes.in_loop(result(graph)) and not axes.barriers


def test_rows_are_those_of_weights_that_are_a_product_no_more() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores = torch.cat([scores, scores[..., :1]], -1)
        return v.mT @ scores.softmax(-1)[..., 1:].mT

    graph = forward_graph(program, X, X, X)
    axes = axes_of(graph, *[Streamed(1)] * 3, length=T)
    output = calls(graph, aten.bmm.default)[1]
    assert axes.kind[output] is Kind.STREAMED and axes.position(output) == Streamed(2)
    assert axes.step[output].whole == {output.args[0]} and not axes.barriers


def test_rows_follow_a_value_of_that_size_which_is_streamed() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        means = k.sum(-1, keepdim=True).expand(B, T, T)
        return (means + (k @ q.mT).mT).tanh()

    graph = forward_graph(program, X, X)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    assert axes.position(only(graph, aten.bmm.default)) == Streamed(2)
    assert axes.position(result(graph)) == Streamed(1) and not axes.barriers


@pytest.mark.parametrize("normalised, rows", [(-1, 1), (-2, 2)])
def test_an_expanded_bias_takes_the_rows_that_nothing_mixes(normalised: int, rows: int) -> None:
    def program(k: Tensor) -> Tensor:
        return k[:, None, :, 0].expand(B, T, T).softmax(normalised)

    graph = forward_graph(program, X)
    axes = axes_of(graph, Streamed(1), length=T)
    bias = only(graph, aten.expand.default)
    assert axes.position(bias) == Streamed(rows) and not axes.barriers
    assert axes.step[bias].whole == ({bias.args[0]} if rows == 1 else set())


def test_a_gradient_has_the_rows_of_the_gradient_that_it_comes_from() -> None:
    def program(k: Tensor, grad: Tensor, q: Tensor) -> Tensor:
        scores_grad = k @ grad.mT
        return (scores_grad @ q) * 2

    graph = forward_graph(program, *torch.zeros(3, B, T, D))
    inputs = graph.find_nodes(op="placeholder")
    places = dict.fromkeys(inputs, Streamed(1))
    dependent = descendants(graph, [inputs[1]])
    axes = find_axes(graph, T, places, set(), dependent=dependent)
    assert axes.position(calls(graph, aten.bmm.default)[0]) == Streamed(2)
    assert axes.position(result(graph)) == Streamed(1) and not axes.barriers


def test_a_product_as_the_values_of_attention_is_reported() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        values = (q @ k.mT).tanh()[:, None]
        settings = (None, None, True, 1.0, 0.0)
        return torch.ops.streambp.attention(q[:, None], k[:, None], values, *settings)[0]

    graph = forward_graph(program, X, X)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    (barrier,) = axes.barriers
    assert "its value is a product of tokens with tokens" in barrier.reason
    assert barrier.bytes == B * T * T * 4


def test_equal_parts_of_the_sequence_make_products_too() -> None:
    def program(x: Tensor, v: Tensor) -> Tensor:
        return (x[:, 1:] @ x[:, 1:].mT).softmax(-1) @ v[:, 1:]

    graph = forward_graph(program, X, torch.zeros(B, T, D))
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    part = Extent(1, 0)
    scores, output = calls(graph, aten.bmm.default)
    assert axes.columns[scores] == Streamed(2, extent=part)
    assert axes.position(output) == Streamed(1, extent=part) and not axes.barriers


def test_a_part_of_the_sequence_against_all_of_it_is_a_barrier() -> None:
    graph = forward_graph(lambda x: (x[:, 1:] @ x.mT).softmax(-1), X)
    axes = axes_of(graph, Streamed(1), length=T)
    assert "two dims of its result" in axes.barriers[0].reason

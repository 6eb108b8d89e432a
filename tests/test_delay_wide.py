"""`delay_wide_values`: what no later layer needs is not kept wide while the later layers run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from streambp_fx.passes.axes import Axes
from streambp_fx.passes.cuts import choose_cuts
from streambp_fx.passes.dataflow import read_joint
from streambp_fx.passes.delay_wide import delay_wide_values
from streambp_fx.passes.placement import Streamed
from tests.joint_graphs import axes_of, capture, forward_graph

B, HEADS, T, D, V = 2, 2, 5, 4, 97
X = torch.zeros(B, HEADS, T, D)
W = torch.zeros(D, V)


def _layer(x: Tensor) -> Tensor:
    q = x * 2
    return x + torch.ops.streambp.attention(q, q * 3, q * 4, None, None, True, 1.0, 0.0)[0]


def _logits_wait(x: Tensor, w: Tensor) -> Tensor:
    first = (_layer(_layer(x)) @ w).exp()
    second = _layer(_layer(x * 5)) @ w
    return (first * second).sum()


def _token_scores_wait(x: Tensor, w: Tensor) -> Tensor:
    first = (_layer(_layer(x)) @ w).logsumexp(-1)
    second = (_layer(_layer(x * 5)) @ w).logsumexp(-1)
    return (first * second).sum()


def _one_model(x: Tensor, w: Tensor) -> Tensor:
    return (_layer(_layer(x)) @ w).logsumexp(-1).sum()


def _forward(program: object) -> tuple[list[Node], Axes, list[set[Node]]]:
    """The forward's nodes in graph order, their axes, and the cuts of `choose_cuts`."""
    graph = forward_graph(program, X, W)
    axes = axes_of(graph, Streamed(2), None, length=T, parameters=[1])
    joint = read_joint(graph, 1)
    flow = [node for node in graph.nodes if axes.in_loop(node) or node in axes.after_loop]
    return flow, axes, choose_cuts(joint, axes).cuts


def _width(node: Node) -> int:
    return int(node.meta["val"].shape[-1])


@pytest.mark.parametrize("program", [_logits_wait, _token_scores_wait, _one_model])
def test_no_cut_keeps_logits_and_the_order_is_topological(program: object) -> None:
    flow, axes, cuts = _forward(program)
    assert cuts and all(_width(value) < V for cut in cuts for value in cut)
    order = delay_wide_values(flow, axes, set())
    assert sorted(order, key=str) == sorted(flow, key=str)
    place = {node: index for index, node in enumerate(order)}
    for node in order:
        assert all(place[arg] < place[node] for arg in node.all_input_nodes if arg in place)


def test_logits_that_wait_are_computed_after_the_second_models_layers() -> None:
    flow, axes, _ = _forward(_logits_wait)
    order = delay_wide_values(flow, axes, set())
    wide = next(index for index, node in enumerate(order) if _width_or_none(node) == V)
    attention = [i for i, n in enumerate(order) if n.target is torch.ops.streambp.attention.default]
    assert wide > max(attention)


@pytest.mark.parametrize("program", [_token_scores_wait, _one_model])
def test_narrow_results_stay_where_they_are(program: object) -> None:
    flow, axes, _ = _forward(program)
    assert delay_wide_values(flow, axes, set()) == flow


def test_head_of_a_trained_model_joins_the_last_segment() -> None:
    weight = torch.nn.Parameter(torch.ones(D, V))
    segments = capture(_token_scores_wait, X + 1, weight).analyse().segments
    logits = {segments.segment[n] for n in segments.flow if _width_or_none(n) == V}
    assert logits == {segments.count - 1}
    assert segments.count > 2


def _width_or_none(node: Node) -> int | None:
    value = node.meta["val"]
    return int(value.shape[-1]) if isinstance(value, Tensor) and value.dim() else None

"""`find_axes`: where the sequence axis runs, what becomes a sum, and what is a barrier."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from streambp_fx._torch import detect_fake_mode
from streambp_fx.passes.axes import Axes, Kind
from streambp_fx.passes.placement import Extent, Streamed
from tests.joint_graphs import aten, axes_of, calls, capture, forward_graph, only, result

B, T, D = 2, 5, 3
X = torch.zeros(B, T, D)
W = torch.zeros(7, D)


def _reasons(axes: Axes) -> list[str]:
    return [barrier.reason for barrier in axes.barriers]


def test_linear_layer_merges_rows_and_parts_them_again() -> None:
    graph = forward_graph(F.linear, X, W)
    axes = axes_of(graph, Streamed(1), None, length=T, parameters=[1])
    assert axes.position(only(graph, aten.mm.default)) == Streamed(0, outer=B)
    assert axes.position(result(graph)) == Streamed(1)
    assert axes.kind[result(graph)] is Kind.STREAMED
    assert axes.kind[only(graph, aten.t.default)] is Kind.GLUE  # the weight's transpose
    assert not axes.barriers


@pytest.mark.parametrize("batch", [1, 4])
def test_equal_sizes_are_not_confused(batch: int) -> None:
    # T is the size of the hidden dim as well: only propagation can tell them apart.
    x, w = torch.zeros(batch, 4, 4), torch.zeros(4, 4)
    graph = forward_graph(lambda x, w: F.linear(x, w).transpose(1, 2), x, w)
    axes = axes_of(graph, Streamed(1), None, length=4, parameters=[1])
    assert axes.position(result(graph)) == Streamed(2)
    assert not axes.barriers


def test_weight_gradient_is_a_sum_over_chunks() -> None:
    graph = forward_graph(
        lambda x, dy: dy.view(B * T, 7).t() @ x.view(B * T, D), X, torch.zeros(B, T, 7)
    )
    axes = axes_of(graph, Streamed(1), Streamed(1), length=T)
    assert axes.kind[result(graph)] is Kind.SUM
    assert axes.position(result(graph)) is None


def test_sum_over_tokens_is_a_sum_and_what_follows_waits_for_it() -> None:
    graph = forward_graph(lambda x: x.sum(1) * 2, X)
    axes = axes_of(graph, Streamed(1), length=T)
    assert axes.kind[only(graph, aten.sum.dim_IntList)] is Kind.SUM
    product = only(graph, aten.mul.Tensor)
    assert axes.kind[product] is Kind.GLUE and product in axes.after_loop
    assert not axes.barriers


def _shifted(x: Tensor) -> Tensor:
    x = x * 2
    return x[:, 1:] + x[:, :-1]


def _symmetric_part(x: Tensor) -> Tensor:
    scores = x @ x.transpose(1, 2)
    return scores + scores.transpose(1, 2)


@pytest.mark.parametrize(
    "program, reason",
    [
        (lambda x: torch.softmax(x, 1), "the op mixes tokens"),
        (lambda x: x.cumsum(1), "the op mixes tokens"),
        (lambda x: x.amax(1), "the op mixes tokens"),
        (_symmetric_part, "needs a product of tokens with tokens along both of its dims"),
        (lambda x: torch.linalg.inv_ex(x[:, :3] @ x[:, :3].mT)[0], "no rule for this op"),
        (_shifted, "its inputs cover different parts of the sequence (a shift between tokens)"),
    ],
)
def test_barriers_say_why(program: Callable[[Tensor], Tensor], reason: str) -> None:
    graph = forward_graph(program, X)
    axes = axes_of(graph, Streamed(1), length=T)
    assert any(reason in one for one in _reasons(axes))
    for barrier in axes.barriers:
        assert not any(axes.in_loop(n) for n in graph.nodes if str(n.target) == barrier.op)


def test_barrier_keeps_the_axis_so_that_what_follows_is_streamed() -> None:
    graph = forward_graph(lambda x: (x * 2).cumsum(1) * 3, X)
    axes = axes_of(graph, Streamed(1), length=T)
    first, last = calls(graph, aten.mul.Tensor)
    assert axes.in_loop(first) and axes.in_loop(last)
    assert not axes.in_loop(only(graph, aten.cumsum.default))
    assert axes.barriers[0].bytes == X.numel() * X.element_size()


def test_labels_are_prologue_and_no_barrier() -> None:
    ids = torch.zeros(B, T, dtype=torch.int64)
    graph = forward_graph(lambda ids: (ids.cumsum(1) * 2, ids[:, 1:].ne(-100).sum()), ids)
    axes = axes_of(graph, Streamed(1), length=T)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert all(node in axes.prologue and not axes.in_loop(node) for node in nodes)
    assert not axes.barriers


def test_embedding_of_a_parameter_is_streamed_by_its_ids() -> None:
    ids = torch.zeros(B, T, dtype=torch.int64)
    graph = forward_graph(lambda w, ids: F.embedding(ids, w), W, ids)
    axes = axes_of(graph, None, Streamed(1), length=T, parameters=[0])
    assert axes.position(result(graph)) == Streamed(1) and axes.in_loop(result(graph))


def test_slice_of_the_axis_narrows_its_extent() -> None:
    graph = forward_graph(lambda x: (x * 2)[:, :-1] * 3, X)
    axes = axes_of(graph, Streamed(1), length=T)
    assert axes.position(result(graph)) == Streamed(1, extent=Extent(0, 1))
    assert axes.in_loop(result(graph))


def test_symbolic_length_adds_no_guard() -> None:
    captured = capture(
        lambda x, w: F.linear(x[:, :-1] * 2, w).exp(),
        X.clone().requires_grad_(),
        W.clone().requires_grad_(),
        dynamic=[(0, 1)],
    )
    (length,) = (n for n in captured.primals if isinstance(n, int))
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    mode = detect_fake_mode([node.meta["val"] for node in placeholders])
    assert mode is not None and mode.shape_env is not None
    env = mode.shape_env
    guards = len(env.guards)
    analysis = captured.analyse()
    output = analysis.joint.forward_outputs[0]
    assert length == T and isinstance(output, Node)
    assert analysis.axes.in_loop(output) and not analysis.axes.barriers
    assert analysis.axes.position(output) == Streamed(1, extent=Extent(0, 1))
    assert len(env.guards) == guards


def _attention(x: Tensor) -> tuple[Tensor, Tensor]:
    q = x * 2
    return torch.ops.streambp.attention(q, q * 3, q * 4, None, None, True, 1.0, 0.0)


def test_attention_is_streamed_along_its_third_dim() -> None:
    graph = forward_graph(_attention, torch.zeros(B, 2, T, D))
    axes = axes_of(graph, Streamed(2), length=T)
    node = only(graph, torch.ops.streambp.attention.default)
    assert axes.in_loop(node) and axes.place[node] == (Streamed(2), Streamed(2))


def test_attention_over_another_dim_is_a_barrier() -> None:
    graph = forward_graph(_attention, torch.zeros(B, T, T, D))
    axes = axes_of(graph, Streamed(1), length=T)
    assert _reasons(axes) == ["the sequence axis of query is not its third dim, in full"]


def test_attention_over_a_second_sequence_is_reported() -> None:
    graph = forward_graph(
        lambda x, w: (x * 2, *_attention(F.linear(w, w[:, :3])[None, None])), X, torch.zeros(9, 3)
    )
    axes = axes_of(graph, Streamed(1), None, length=T, parameters=[1])
    assert _reasons(axes) == ["its sequence is not the streamed one (another length)"]


def test_gradient_that_meets_a_shifted_mask_first_follows_the_logits() -> None:
    """``(loss * mask[:, 1:]).sum()``: the mask lacks the first token, the logits the last."""

    def program(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        each = F.linear(x, w)[:, :-1].logsumexp(-1)
        return (each * mask[:, 1:]).sum(-1).square().sum()

    mask = torch.ones(B, T, dtype=torch.int64)
    analysis = capture(program, X.clone().requires_grad_(), W.clone().requires_grad_(), mask)
    axes = analysis.analyse().axes
    assert not axes.barriers
    extents = {
        place.extent
        for node in axes.kind
        if axes.in_loop(node) and (place := axes.position(node)) is not None
    }
    assert extents == {Extent(), Extent(0, 1)}


def test_a_shift_of_tokens_is_reported_though_it_has_the_shape_of_a_parameter() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        x = x * w
        return (torch.slice_scatter(x, x[:-1], 0, 1) * 2).exp().sum()

    graph = forward_graph(program, torch.zeros(T, D), torch.zeros(T, D))
    axes = axes_of(graph, Streamed(0), None, length=T, parameters=[1])
    assert [barrier.op for barrier in axes.barriers] == ["aten.slice_scatter.default"]

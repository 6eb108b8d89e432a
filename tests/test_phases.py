"""`assign_phases`: which values a loop must finish before the next one of its segment starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from streambp_fx.passes.axes import Axes
from streambp_fx.passes.dataflow import descendants
from streambp_fx.passes.phases import (
    Need,
    assign_phases,
    descends,
    finished_after_loop,
    needs,
)
from streambp_fx.passes.placement import Streamed
from tests.joint_graphs import aten, axes_of, calls, forward_graph, only, result

ATTENTION = torch.ops.streambp.attention.default
ATTENTION_BACKWARD = torch.ops.streambp.attention_backward.default
HEADS = torch.zeros(2, 2, 5, 3)


def _phases(
    program: Callable[..., Any], *inputs: Tensor, at: int, backward: bool = False
) -> tuple[Graph, Axes, dict[Node, int]]:
    graph = forward_graph(program, *inputs)
    axes = axes_of(graph, *[Streamed(at)] * len(inputs), length=5)
    assert not axes.barriers
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return graph, axes, assign_phases(nodes, axes, backward)


def _attention(x: Tensor, causal: bool = True) -> Tensor:
    q, k, v = x * 2, x * 3, x * 4
    return torch.ops.streambp.attention(q, k, v, None, None, causal, 1.0, 0.0)[0] * 5


def test_local_ops_share_one_phase() -> None:
    _, _, phase = _phases(lambda x: (x * 2).exp() + x.sin(), torch.zeros(2, 5, 3), at=1)
    assert set(phase.values()) == {0}


def test_causal_attention_in_forward_shares_one_phase() -> None:
    _, _, phase = _phases(_attention, HEADS, at=2)
    assert set(phase.values()) == {0}


def test_keys_and_values_come_first_in_backward() -> None:
    graph, axes, phase = _phases(_attention, HEADS, at=2, backward=True)
    q, k, v, after = calls(graph, aten.mul.Tensor)
    attention = only(graph, ATTENTION)
    assert (phase[k], phase[v]) == (0, 0)
    assert (phase[q], phase[attention], phase[after]) == (1, 1, 1)
    assert needs(attention, axes, True) == [
        (q, Need.LOCAL),
        (k, Need.WHOLE),
        (v, Need.WHOLE),
    ]
    assert (k, Need.PAST) in needs(attention, axes, False)


def test_attention_that_is_not_causal_waits_in_forward() -> None:
    graph, _, phase = _phases(lambda x: _attention(x, causal=False), HEADS, at=2)
    q, k, v, _ = calls(graph, aten.mul.Tensor)
    assert (phase[k], phase[v], phase[q]) == (0, 0, 1)


def test_what_reads_a_finished_sum_waits() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        return y / y.sum(1, keepdim=True)

    graph, axes, phase = _phases(program, torch.zeros(2, 5, 3), at=1)
    total = only(graph, aten.sum.dim_IntList)
    assert finished_after_loop(total, axes)
    assert phase[total] == 0 and phase[result(graph)] == 1


def test_values_are_made_as_late_as_possible() -> None:
    # z is read in the second phase alone, so that the first loop need not keep it.
    def program(x: Tensor) -> Tensor:
        z = x * 3
        return z / (x * 2).sum(1, keepdim=True)

    graph, _, phase = _phases(program, torch.zeros(2, 5, 3), at=1)
    late, early = calls(graph, aten.mul.Tensor)
    assert (phase[early], phase[late]) == (0, 1)


def _backward(x: Tensor, causal: bool) -> Tensor:
    q, k, v = x * 2, x * 3, x * 4
    out, logsumexp = torch.ops.streambp.attention(q, k, v, None, None, causal, 1.0, 0.0)
    grads = torch.ops.streambp.attention_backward(
        out, q, k, v, None, None, out, logsumexp, causal, 1.0, 0.0
    )
    return grads[0] + grads[1].exp() + grads[2].exp()


def test_gradients_of_causal_keys_are_complete_within_a_descending_loop() -> None:
    graph, axes, phase = _phases(lambda x: _backward(x, True), HEADS, at=2, backward=True)
    node = only(graph, ATTENTION_BACKWARD)
    assert descends(list(phase)) and not descends([only(graph, ATTENTION)])
    assert phase[node] == phase[result(graph)] == 1
    assert not any(finished_after_loop(user, axes) for user in node.users)


def test_gradients_of_other_keys_are_complete_after_the_loop() -> None:
    graph, axes, phase = _phases(lambda x: _backward(x, False), HEADS, at=2, backward=True)
    node = only(graph, ATTENTION_BACKWARD)
    query, key, value = sorted(node.users, key=lambda user: int(str(user.args[1])))
    assert [finished_after_loop(user, axes) for user in (query, key, value)] == [False, True, True]
    assert phase[result(graph)] == phase[key] + 1


def test_gradient_of_a_product_waits_for_what_reads_it() -> None:
    def program(q: Tensor, k: Tensor, grad: Tensor) -> Tensor:
        grad = grad * 2
        total = (q @ k.mT).softmax(-1).mT @ grad
        return (grad @ k.mT + total @ q.mT).tanh().sum(-1)

    graph = forward_graph(program, *torch.zeros(3, 2, 5, 3))
    axes = axes_of(graph, *[Streamed(1)] * 3, length=5)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    dependent = descendants(graph, graph.find_nodes(op="placeholder")[2:])
    phase = assign_phases(nodes, axes, True, dependent)
    weights, total, one, other = calls(graph, aten.bmm.default)
    assert phase[weights] == phase[total] < phase[one] == phase[other]

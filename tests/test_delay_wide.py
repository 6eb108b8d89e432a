"""`delay_wide_values`: what no later layer needs is not kept wide while the later layers run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from streambp_fx.passes.delay_wide import delay_wide_values
from streambp_fx.passes.flow import ATTENTION, Flow, read_flow
from streambp_fx.passes.normalize_attention import normalize_attention
from streambp_fx.passes.waists import find_waists

B, HEADS, T, D, V = 2, 2, 5, 4, 97
X = torch.zeros(B, HEADS, T, D, requires_grad=True)
W = torch.zeros(D, V, requires_grad=True)
FROZEN = torch.zeros(D, V)


def _layer(x: Tensor) -> Tensor:
    q = x * 2
    return x + torch.nn.functional.scaled_dot_product_attention(q, q * 3, q * 4, is_causal=True)


def _logits_wait(x: Tensor, w: Tensor) -> Tensor:
    first = (_layer(_layer(x)) @ w).exp()
    second = _layer(_layer(x * 5)) @ w
    return (first * second).sum()


def _token_scores_wait(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        first = (_layer(_layer(x)) @ w).logsumexp(-1)
    second = (_layer(_layer(x * 5)) @ w).logsumexp(-1)
    return (first * second).sum()


def _trained_scores_wait(x: Tensor, w: Tensor) -> Tensor:
    first = (_layer(_layer(x)) @ w).logsumexp(-1)
    second = (_layer(_layer(x * 5)) @ w).logsumexp(-1)
    return (first * second).sum()


def _one_model(x: Tensor, w: Tensor) -> Tensor:
    return (_layer(_layer(x)) @ w).logsumexp(-1).sum()


def _flow(program: Callable[..., Any], w: Tensor) -> Flow:
    found: list[Flow] = []

    def backend(graph_module: GraphModule, _: Any) -> Callable[..., Any]:
        normalize_attention(graph_module)
        flow = read_flow(graph_module.graph)
        flow.put_in_order(delay_wide_values(flow))
        found.append(flow)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True, dynamic=False)(X, w)
    return found[0]


def _width(node: Node) -> int:
    value = node.meta["example_value"]
    return int(value.shape[-1]) if isinstance(value, Tensor) and value.dim() else 0


def _places(flow: Flow) -> tuple[list[int], int]:
    """The positions of the first value as wide as logits, and of the last attention."""
    wide = [index for index, node in enumerate(flow.calls) if _width(node) == V]
    return wide, max(i for i, node in enumerate(flow.calls) if node.target is ATTENTION)


PROGRAMS = [_logits_wait, _token_scores_wait, _trained_scores_wait, _one_model]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_order_is_topological_and_no_wide_value_crosses(program: Callable[..., Any]) -> None:
    flow = _flow(program, W)
    calls = [node for node in flow.graph.nodes if node in set(flow.calls)]
    assert sorted(flow.calls, key=str) == sorted(calls, key=str)
    for node in flow.calls:
        inputs = [one for one in node.all_input_nodes if one in flow.order]
        assert all(flow.order[one] < flow.order[node] for one in inputs)
    for position in find_waists(flow, []):
        before = flow.calls[: position + 1]
        crossing = [n for n in before if any(flow.order.get(u, 0) > position for u in n.users)]
        assert crossing and all(_width(node) < V for node in crossing)


@pytest.mark.parametrize("program", [_logits_wait, _trained_scores_wait])
def test_logits_that_wait_or_are_trained_come_after_the_second_models_layers(
    program: Callable[..., Any],
) -> None:
    wide, last = _places(_flow(program, W))
    assert min(wide) > last


def test_narrow_results_of_a_reference_stay_where_they_are() -> None:
    flow = _flow(_token_scores_wait, FROZEN)
    wide, last = _places(flow)
    assert min(wide) < last
    assert flow.calls == [node for node in flow.graph.nodes if node in set(flow.calls)]

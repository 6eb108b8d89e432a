"""`normalize`: aliases, repeats, dead nodes and sizes read from tensors go; values stay."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from streambp_fx.passes.normalize import normalize
from tests.joint_graphs import aten, calls, capture, only, run_graph


def _graph_with_repeats() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    alias = graph.call_function(aten.alias.default, (x,))
    first = graph.call_function(aten.view.default, (x, [6, 4]))
    second = graph.call_function(aten.view.default, (alias, [6, 4]))
    graph.call_function(aten.exp.default, (x,))  # nothing reads it
    graph.output((graph.call_function(aten.add.Tensor, (first, second)),))
    return GraphModule(torch.nn.Module(), graph)


def test_aliases_repeats_and_dead_nodes_go() -> None:
    normal = normalize(_graph_with_repeats())
    assert [node.target for node in normal.graph.nodes if node.op == "call_function"] == [
        aten.view.default,
        aten.add.Tensor,
    ]
    view = only(normal.graph, aten.view.default)
    assert only(normal.graph, aten.add.Tensor).args == (view, view)
    x = torch.arange(24.0).view(2, 3, 4)
    torch.testing.assert_close(run_graph(normal, [x]), [2 * x.view(6, 4)])


def test_random_ops_are_not_merged() -> None:
    graph = Graph()
    draws = [
        graph.call_function(aten.rand.default, ([4],), {"device": torch.device("cpu")})
        for _ in range(2)
    ]
    graph.output(tuple(draws))
    normal = normalize(GraphModule(torch.nn.Module(), graph))
    assert len(calls(normal.graph, aten.rand.default)) == 2


def _shifted_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x[:, :-1] * 2, w).exp()


def test_sizes_come_from_inputs() -> None:
    x, w = (torch.randn(shape, requires_grad=True) for shape in ((2, 5, 3), (7, 3)))
    captured = capture(_shifted_linear, x, w, dynamic=[(0, 1)])
    before = captured.graph_module.graph
    assert calls(before, aten.sym_size.int), "the case has no size read from a tensor"
    expected = run_graph(captured.graph_module, captured.inputs())
    normal = normalize(captured.graph_module)
    assert not calls(normal.graph, aten.sym_size.int)
    size = next(iter(normal.graph.find_nodes(op="placeholder")))
    sums = calls(normal.graph, operator.add)
    assert any(size in node.args and -1 in node.args for node in sums), "T - 1 is made of T"
    for got, wanted in zip(run_graph(normal, captured.inputs()), expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted)

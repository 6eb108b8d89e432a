"""What reads memory by strides is given the memory of the traced program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.body_builder import RewriteError
from streambp_fx.passes.pin_layouts import pin_layouts

aten = torch.ops.aten


def traced(program: Callable[[Tensor], Tensor], x: Tensor) -> GraphModule:
    """The aten graph of ``program``, with fake values."""
    return make_fx(program, tracing_mode="fake")(x)


def ops(graph_module: GraphModule) -> str:
    """The calls in order."""
    nodes = graph_module.graph.find_nodes(op="placeholder")
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return " ".join([*(n.name for n in nodes), *(str(n.target).split(".")[1] for n in calls)])


def test_before_and_after() -> None:
    def program(x: Tensor) -> Tensor:
        return aten.as_strided(aten.transpose(x * 2, 0, 1), [2, 11, 16], [176, 16, 1])

    x = torch.rand(11, 2, 16)
    graph_module = traced(program, x)
    assert ops(graph_module) == "x_1 mul transpose as_strided"
    pin_layouts(graph_module)
    graph_module.graph.eliminate_dead_code()
    assert ops(graph_module) == "x_1 mul permute clone as_strided"
    torch.testing.assert_close(graph_module(x), program(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: aten.as_strided((x * 2).transpose(0, 2), [4, 3], [1, 2], 5),
        lambda x: aten.as_strided((x * 2)[1:, :1].transpose(0, 1), [4, 3], [1, 2]),
        lambda x: aten.as_strided((x * 2)[1:], [4, 3], [1, 2], 0),
        lambda x: aten.as_strided_scatter((x.transpose(0, 2) * 2), x[0, 0] * 3, [7], [3], 1),
        lambda x: _written(x.transpose(0, 1) * 2),
    ],
)
def test_results_do_not_depend_on_how_values_lie(program: Callable[[Tensor], Tensor]) -> None:
    """Each op but the copies gives its result in another layout than when it was traced."""
    x = torch.arange(7 * 5 * 7, dtype=torch.float32).view(7, 5, 7)
    graph_module = traced(program, x)
    pin_layouts(graph_module)
    nodes = graph_module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    nodes += graph_module.graph.find_nodes(op="call_function", target=aten.permute.default)
    for node in nodes:
        with graph_module.graph.inserting_after(node):
            other = graph_module.graph.call_function(_in_another_layout, (node,))
        node.replace_all_uses_with(other, delete_user_cb=lambda user, own=other: user is not own)
    graph_module.recompile()
    torch.testing.assert_close(graph_module(x), program(x), rtol=0, atol=0)


def _written(x: Tensor) -> Tensor:
    """A part of ``x``, which was written through that part."""
    part = aten.as_strided(x, [7, 5], [5, 1], 3)
    return aten.as_strided(aten.as_strided_scatter(x, part * 3, [7, 5], [5, 1], 3), [9], [4], 2)


def _in_another_layout(x: Tensor) -> Tensor:
    dims = list(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


def test_inputs_are_read_as_they_are() -> None:
    x = torch.rand(11, 2, 16)
    graph_module = traced(lambda x: aten.as_strided(x, [3, 4], [2, 1]), x)
    pin_layouts(graph_module)
    assert ops(graph_module) == "x_1 as_strided"


def test_memory_beyond_a_value_is_refused() -> None:
    graph_module = traced(
        lambda x: aten.as_strided(x.expand(5, 4) + 0, [3, 4], [2, 1]), torch.rand(4)
    )
    (node,) = graph_module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    node.meta["val"] = node.meta["val"][:, :2]
    with pytest.raises(RewriteError, match=r"as_strided.default reads memory beyond add"):
        pin_layouts(graph_module)

"""Which calls of a Dynamo graph write to memory, and when a value may be read later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from streambp_fx.passes.writes import Writes


def graph_of(program: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The Dynamo graph of ``program``."""
    graphs: list[GraphModule] = []

    def backend(graph_module: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def node_of(module: GraphModule, name: str) -> Node:
    """The first call of ``name``."""
    for node in module.graph.nodes:
        if name in (node.target, getattr(node.target, "__name__", "")):
            return node
    raise LookupError(f"{name} in {module.graph}")


def _through_a_view(x: Tensor) -> None:
    x[:2].t()[1].mul_(2)


def _without_gradient(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def _through_data(x: Tensor) -> None:
    x.data.add_(1)


def _through_detach(x: Tensor) -> None:
    x.detach().zero_()


def _augmented(x: Tensor) -> None:
    x /= 2


def _assigned(x: Tensor) -> None:
    x[:, 0] = 0


def _chunks(x: Tensor) -> None:
    first, _ = x.chunk(2, dim=1)
    first.neg_()


@torch.library.custom_op("streambp_tests::double_in_place", mutates_args=("x",))
def _double(x: Tensor) -> None:
    x.mul_(2)


@torch._dynamo.allow_in_graph
def _unknown_function(x: Tensor) -> Tensor:
    return x.add_(1)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.zero_(),
    "masked fill": lambda x: x.masked_fill_(x > 0, 1.0),
    "function": lambda x: torch.relu_(x),
    "augmented assignment": _augmented,
    "assignment": _assigned,
    "view": _through_a_view,
    "part": _chunks,
    "no_grad": _without_gradient,
    "data": _through_data,
    "detach": _through_detach,
    "out": lambda x: torch.add(x, 1, out=x),
    "inplace": lambda x: F.relu(x, inplace=True),
    "dropout in place": lambda x: F.dropout(x, 0.5, True, True),
    "list": lambda x: torch._foreach_add_([x, x.clone()], 1.0),
    "op": lambda x: torch.ops.aten.add_.Tensor(x, x),
    "packet": lambda x: torch.ops.aten.mul_(x, 2),
    "custom op": lambda x: torch.ops.streambp_tests.double_in_place(x),
    "statistics": lambda x: torch.batch_norm(
        torch.ones(5, 2), None, None, x[0, :2], x[1, :2], True, 0.1, 1e-5, False
    ),
    "statistics by name": lambda x: F.batch_norm(
        torch.ones(5, 2), running_mean=x[0, :2], running_var=x[1, :2], training=True
    ),
    "rows of an embedding": lambda x: F.embedding(torch.tensor([0]), x, max_norm=0.1),
    "unknown function": lambda x: _unknown_function(x),
    "body of a checkpoint": lambda x: checkpoint(lambda y: y.mul_(2), x, use_reentrant=False),
}


@pytest.mark.parametrize("form", WRITES)
def test_a_value_that_is_written_between_two_reads_is_told(form: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, other = x.sin(), x.cos()
        first = value.exp()
        WRITES[form](value)
        return first, value.log(), other

    graph_module = graph_of(program, torch.rand(4, 6))
    writes = Writes(graph_module.graph)
    value, first, last = (node_of(graph_module, name) for name in ("sin", "exp", "log"))
    assert writes.between(value, first, last) is not None
    assert writes.between(value, value, first) is None
    assert writes.writers(node_of(graph_module, "cos")) == []


READS: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.add(1),
    "view": lambda x: x.view(-1)[3:],
    "clone": lambda x: x.clone().zero_(),
    "contiguous copy": lambda x: x.t().contiguous().zero_(),
    "cast": lambda x: x.double().zero_(),
    "inplace of false": lambda x: F.relu(x, inplace=False),
    "dropout": lambda x: F.dropout(x, 0.5, True, False),
    "op": lambda x: torch.ops.aten.add.Tensor(x, x),
    "operators that are called and_ and or_": lambda x: ((x > 0) & (x < 1)) | (x > 2),
    "read by a write": lambda x: torch.zeros(4, 6).add_(x),
    "read by an assignment": lambda x: torch.zeros(4, 6).__setitem__(0, x[0]),
    "body of a checkpoint": lambda x: checkpoint(lambda y: y * 2, x, use_reentrant=False),
    "embedding": lambda x: F.embedding(torch.tensor([0]), x),
}


@pytest.mark.parametrize("form", READS)
def test_a_value_that_is_read_alone_is_not_told_of(form: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, Any, Tensor]:
        value = x.sin()
        first = value.exp()
        return first, READS[form](value), value.log()

    graph_module = graph_of(program, torch.rand(4, 6))
    writes = Writes(graph_module.graph)
    assert writes.writers(node_of(graph_module, "sin")) == []
    if "operator" in form:
        assert not writes


def test_inputs_that_are_views_of_one_tensor_share_its_writes() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = x.exp()
        y.zero_()
        return first, x.log()

    both = torch.rand(8)
    graph_module = graph_of(program, both[:6], both[2:])
    x, _ = graph_module.graph.find_nodes(op="placeholder")
    first, last = (node_of(graph_module, name) for name in ("exp", "log"))
    writer = Writes(graph_module.graph).between(x, first, last)
    assert writer is not None and writer.target == "zero_"

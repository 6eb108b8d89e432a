"""`compute_out_of_place`: a residual stream that is written in place becomes new values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from streambp_fx.passes.out_of_place import compute_out_of_place
from streambp_fx.passes.writes import Writes, memory_of

X = torch.arange(12.0).reshape(3, 4)


def _graphs(program: Callable[..., Any], *inputs: Tensor) -> tuple[Graph, GraphModule]:
    """The Dynamo graph of ``program``, and the module after the pass."""
    found: list[GraphModule] = []

    def backend(graph_module: GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    before = Graph()
    before.output(before.graph_copy(found[0].graph, {}))
    compute_out_of_place(found[0])
    found[0].graph.lint()
    return before, found[0]


def _ops(graph: Graph) -> list[str]:
    calls = (node for node in graph.nodes if node.op.startswith("call"))
    return [str(getattr(node.target, "__name__", node.target)) for node in calls]


def stream(x: Tensor) -> Tensor:
    h = x * 2
    h += h.exp()
    h *= h.sin()
    return h.sum()


def methods(x: Tensor) -> Tensor:
    h = x * 2
    h.add_(h.exp(), alpha=0.5)
    h.mul_(3)
    return h.sum() + h.mean()


def test_writes_become_new_values() -> None:
    before, after = _graphs(stream, X)
    assert _ops(before) == ["mul", "exp", "iadd", "sin", "imul", "sum"]
    assert _ops(after.graph) == ["mul", "exp", "add", "sin", "mul", "sum"]
    assert not Writes(after.graph)
    calls = [node for node in after.graph.nodes if node.op.startswith("call")]
    memory = [memory_of(node) for node in calls]
    assert len(frozenset().union(*memory)) == len(calls)  # examples share none


@pytest.mark.parametrize("program", [stream, methods])
def test_the_program_is_the_same(program: Callable[..., Any]) -> None:
    _, after = _graphs(program, X)
    assert not any(name.startswith("i") or name.endswith("_") for name in _ops(after.graph))
    torch.testing.assert_close(after(X)[0], program(X), rtol=0, atol=0)


def an_input(x: Tensor) -> Tensor:
    x += 1
    return x.sum()


def a_view_before(x: Tensor) -> Tensor:
    h = x * 2
    row = h[0]
    h += 1
    return h.sum() + row.sum()


def a_part(x: Tensor) -> Tensor:
    h = x * 2
    row = h[0]
    row += 1
    return h.sum()


def detached_before(x: Tensor) -> Tensor:
    h = x * 2
    seen = h.detach()
    h += 1
    return h.sum() + seen.sum()


def another_dtype(x: Tensor) -> Tensor:
    h = (x * 2).half()
    h += x
    return h.sum()


def without_gradient(x: Tensor) -> Tensor:
    h = x * 2
    with torch.no_grad():
        h += 1
    return h.sum()


@pytest.mark.parametrize(
    "program", [an_input, a_view_before, a_part, detached_before, another_dtype, without_gradient]
)
def test_writes_that_something_else_sees_stay(program: Callable[..., Any]) -> None:
    before, after = _graphs(program, X.clone())
    assert _ops(after.graph) == _ops(before)


def test_a_view_may_be_written_before_what_it_is_of() -> None:
    def program(x: Tensor) -> Tensor:
        h = x * 2
        row = h.view(-1)
        row += 1
        h += 1
        return h.sin().sum()

    x = X.clone().requires_grad_()
    before, after = _graphs(program, x)
    assert "iadd" in _ops(before)
    torch.testing.assert_close(after(x)[0], program(x), rtol=0, atol=0)
    (got,), (want,) = (torch.autograd.grad(value, x) for value in (after(x)[0], program(x)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_views_and_writes_after_a_new_value_are_of_its_memory() -> None:
    def program(x: Tensor) -> Tensor:
        h = x * 2
        h += 1
        h[:, 0] = 7
        row = h[1]
        row *= 2
        return h.sum() + row.sum()

    before, after = _graphs(program, X)
    assert "iadd" in _ops(before) and "iadd" not in _ops(after.graph)
    assert "setitem" in _ops(after.graph) and "imul" in _ops(after.graph)
    torch.testing.assert_close(after(X)[0], program(X), rtol=0, atol=0)

"""Capturing what the attention passes make of a program, and comparing it with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from streambp_fx.passes.attention_call import Refusal
from streambp_fx.passes.normalize_attention import normalize_attention

ATTENTION = torch.ops.streambp.attention.default


class Captured:
    """A backend that normalises attention and runs the Dynamo graph as it is then."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.refusals: list[Refusal] = []

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.refusals += normalize_attention(graph_module)
        graph_module.graph.lint()
        self.graphs.append(graph_module)
        return graph_module.forward

    def nodes(self) -> list[Node]:
        return [
            node
            for graph_module in self.graphs
            for module in graph_module.modules()
            if isinstance(module, GraphModule)
            for node in module.graph.nodes
        ]

    def attentions(self) -> list[Node]:
        return [node for node in self.nodes() if node.target is ATTENTION]

    def count(self, name: str) -> int:
        """How many nodes call a function or method of this name."""
        return sum(
            name
            == (
                node.target
                if isinstance(node.target, str)
                else getattr(node.target, "__name__", "")
            )
            for node in self.nodes()
        )


def compare(
    program: Callable[..., Tensor],
    *inputs: Tensor,
    atol: float = 1e-12,
    dynamic: bool = False,
) -> Captured:
    """Run ``program`` in eager and normalised; results and gradients must agree.

    With ``dynamic`` the length, dim 2 of 4, is symbolic, and a guard that fixes it is an error.
    """
    torch._dynamo.reset()
    captured = Captured()
    compiled = torch.compile(program, backend=captured, fullgraph=True, dynamic=False)
    results = []
    for function in (program, compiled):
        fresh = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        if dynamic and function is compiled:
            for x in fresh:
                torch._dynamo.mark_dynamic(x, 2)
        result = function(*fresh)
        weights = torch.linspace(-1.0, 1.0, result.numel(), dtype=result.dtype).view_as(result)
        leaves = [x for x in fresh if x.requires_grad]
        gradients = torch.autograd.grad(result, leaves, weights) if leaves else ()
        results.append((result, *gradients))
    for eager, other in zip(*results, strict=True):
        assert eager.dtype == other.dtype
        torch.testing.assert_close(other, eager, rtol=0.0, atol=atol, equal_nan=True)
    for node in captured.nodes():
        _check_example(node)
    return captured


def _check_example(node: Node) -> None:
    if node.op in ("call_function", "call_method") and "attention" in node.name:
        assert node.meta.get("example_value") is not None, node

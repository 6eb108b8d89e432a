"""What `explain` writes as Python runs, and computes what the graphs do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streambp_fx.explaining.explanation import ExplainedGraph
from tests.own_models import NanoGPT, TrilGPT
from tests.test_explain import IDS, explain


@pytest.mark.parametrize("model", [NanoGPT(layers=2), TrilGPT()], ids=["fused", "written_out"])
def test_the_python_of_forward_and_backward_computes_the_gradients(model: nn.Module) -> None:
    model = model.double()
    (capture,) = explain(model, IDS, IDS).captures
    graphs = {number: graph for graph in capture.segments for number in graph.segments}
    chain = capture.graphs["chain"]
    given = [argument(node.name, model) for node in chain.graph.find_nodes(op="placeholder")]
    loss = model(IDS, IDS)
    want = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(
        program(capture.python("chain"))(*given)[0], loss, rtol=1e-12, atol=0
    )
    got = Written(chain, graphs).run(*given)[0]
    torch.testing.assert_close(got, loss, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(got, list(model.parameters()))
    for gradient, expected in zip(gradients, want, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


class Written(torch.fx.Interpreter):
    """Runs a chain with the Python of its segments' forward and backward graphs."""

    def __init__(self, chain: torch.fx.GraphModule, graphs: dict[int, ExplainedGraph]) -> None:
        super().__init__(chain)
        self.graphs = graphs
        self.number = 0

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not any(isinstance(one, Tensor) and one.is_floating_point() for one in args):
            return super().call_module(target, args, kwargs)  # what is computed before all segments
        graph = self.graphs[self.number]
        self.number += 1
        forward, backward = (program(graph.python(name)) for name in ("forward", "backward"))
        inputs = graph.graphs["backward"].graph.find_nodes(op="placeholder")

        class Segment(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Any) -> Any:
                result, *saved = forward(*given)
                ctx.saved = saved[-(len(inputs) - 1) :]
                return result

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                return tuple(backward(*ctx.saved, gradient))

        return (Segment.apply(*args),)


def program(text: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(text, "<explained>", "exec"), namespace)
    return namespace["Program"]().forward


def argument(placeholder: str, model: nn.Module) -> Tensor:
    """The tensor that Dynamo calls ``placeholder``."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in named.items():
        flat = name.replace(".", "_modules_", name.count(".") - 1).replace(".", "_parameters_")
        spelled = (flat, flat.replace("_parameters_", "_buffers_"))
        if any(placeholder.endswith(f"modules_{words}_") for words in spelled):
            return value
    return IDS

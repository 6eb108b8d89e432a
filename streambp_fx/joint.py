"""Compile one graph with AOTAutograd, whose partitioner is ours.

Given:  a Dynamo graph, or a segment of one
Result: a function that is one autograd node: its forward and backward are the halves of the joint
        graph, with loops. Without gradients, it is the forward alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from ._torch import (
    aot_autograd,
    changed_inputs,
    copied_graph,
    default_partition,
    functorch_config,
)
from .passes.decompositions import decompositions
from .passes.inputs import InputRole
from .passes.partition import split
from .passes.pipeline import History, Settings, stream
from .passes.rewrite import Rewritten

Attempt = Callable[[Callable[[], Any], History], Any]
"""``attempt(passes, history)``: what ``passes`` return; ``None``, and a note, where they fail."""
RunGraph = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""``run_graph(graph_module, inputs)``: what runs a forward or backward graph."""


class JointCompiler:
    """The compilation of one graph; what was found is in ``history``."""

    def __init__(
        self, settings: Settings, history: History, attempt: Attempt, run_graph: RunGraph
    ) -> None:
        self.settings = settings
        self.history = history
        self.attempt = attempt
        self.run_graph = run_graph
        self.roles: list[InputRole] = []

    def compile(
        self, graph_module: GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """What runs in place of ``graph_module``."""
        self.roles = input_roles(graph_module, example_inputs)
        compiler = aot_autograd(
            fw_compiler=partial(self._run, "forward"),
            bw_compiler=partial(self._run, "backward"),
            inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=decompositions(),
        )
        # At once: to lower a backward takes no time, and what failed in it would fail in training.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            compiled: Callable[..., Any] = compiler(graph_module, list(example_inputs))
        return compiled

    def _run(self, half: str, graph_module: GraphModule, inputs: Sequence[Any]) -> Any:
        self.history.graphs[half] = graph_module  # AOTAutograd may run a copy of what it was given
        return self.run_graph(graph_module, inputs)

    def _partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        changed = changed_inputs(joint)

        def passes() -> tuple[GraphModule, GraphModule] | None:
            rewritten = self._stream(joint, num_fwd_outputs)
            return None if rewritten is None else split(rewritten, num_fwd_outputs, changed)

        halves = self.attempt(passes, self.history)
        if halves is None:
            halves = default_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
            )
        self.history.graphs.update(forward=halves[0], backward=halves[1])
        return halves

    def _inference(self, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        count = len(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
        rewritten = self.attempt(lambda: self._stream(graph_module, count), self.history)
        target = graph_module if rewritten is None else rewritten.graph_module
        return self._run("forward", target, inputs)

    def _stream(self, traced: GraphModule, num_fwd_outputs: int) -> Rewritten | None:
        """The traced graph with loops; ``None``, with the reason in the history, without any."""
        if self.history.unstreamed is not None:  # a pass on the captured graph failed
            return None
        copy = GraphModule(traced, copied_graph(traced.graph))
        return stream(copy, num_fwd_outputs, self.roles, self.settings, self.history)


def input_roles(graph_module: GraphModule, example_inputs: Sequence[Any]) -> list[InputRole]:
    """For each input, whether it is a parameter, a module's buffer, or data."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    roles = []
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(value, torch.nn.Parameter):
            roles.append(InputRole.PARAMETER)
        elif "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}):
            roles.append(InputRole.BUFFER)
        else:
            roles.append(InputRole.DATA)
    return roles

"""Graphs for the tests of single passes: how to get one, analyse it, look into it and run it.

A forward graph (`forward_graph`) is enough for the passes that see one op at a time. A joint
forward-backward graph (`capture`) comes from ``torch.compile``, as in the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx._torch import aot_autograd, default_partition
from streambp_fx.joint import input_roles
from streambp_fx.passes.axes import Axes, find_axes
from streambp_fx.passes.causal_masks import simplify_causal_masks
from streambp_fx.passes.cuts import Segments, choose_cuts
from streambp_fx.passes.dataflow import JointGraph, read_joint
from streambp_fx.passes.decompositions import decompositions
from streambp_fx.passes.inputs import (
    InputRole,
    find_sequence_axes,
    label_tangents,
    read_roles,
)
from streambp_fx.passes.lower import loop_nodes
from streambp_fx.passes.normalize import normalize
from streambp_fx.passes.normalize_attention import normalize_attention
from streambp_fx.passes.pipeline import History, Settings, stream
from streambp_fx.passes.placement import Streamed, hint_of
from streambp_fx.passes.rewrite import Rewritten
from streambp_fx.passes.stages import assign_stages

aten = torch.ops.aten


def forward_graph(program: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> Graph:
    """The aten graph of ``program``, without a backward; its output is a flat list."""
    tracer = make_fx(
        lambda *args: [program(*args)], tracing_mode="symbolic" if symbolic else "fake"
    )
    return tracer(*inputs).graph


def axes_of(
    graph: Graph, *places: Streamed | None, length: Any, parameters: Iterable[int] = ()
) -> Axes:
    """`find_axes` on a graph whose placeholders lie at ``places``, in order."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs = {node: at for node, at in zip(placeholders, places, strict=True) if at is not None}
    return find_axes(graph, length, inputs, {placeholders[index] for index in parameters})


def only(graph: Graph, target: Any) -> Node:
    """The one node of ``graph`` that calls ``target``."""
    (node,) = calls(graph, target)
    return node


def calls(graph: Graph, target: Any) -> list[Node]:
    """The nodes of ``graph`` that call ``target``, in order."""
    return list(graph.find_nodes(op="call_function", target=target))


def result(graph: Graph, index: int = 0) -> Node:
    """A node that ``graph`` returns."""
    return graph.output_node().args[0][index]  # type: ignore[index,return-value]


@dataclass
class Analysis:
    """A normalised joint graph and what each pass found in it."""

    joint: JointGraph
    axes: Axes
    segments: Segments
    stages: dict[Node, int]


@dataclass
class Captured:
    """One joint graph as AOTAutograd gave it to the partitioner, and inputs to run it on."""

    graph_module: GraphModule
    num_forward_outputs: int
    roles: list[InputRole]
    primals: list[Any] = field(default_factory=list)

    def analyse(self) -> Analysis:
        """Run the passes up to the one before `rewrite`."""
        normal = normalize(deepcopy(self.graph_module))
        simplify_causal_masks(normal)
        joint = read_joint(normal.graph, self.num_forward_outputs)
        roles = read_roles(joint, self.roles)
        axis = find_sequence_axes(joint, roles)[0]
        parameters = {node for node, role in roles.items() if role is InputRole.PARAMETER}
        forward = find_axes(joint.graph, axis.length, axis.inputs, parameters)
        inputs = {**axis.inputs, **label_tangents(joint, forward)}
        axes = find_axes(joint.graph, axis.length, inputs, parameters)
        segments = choose_cuts(joint, axes)
        return Analysis(joint, axes, segments, assign_stages(joint, axes, segments))

    def rewrite(self, chunk_size: int = 3, **settings: Any) -> Rewritten:
        """Run all passes; fails where nothing is streamed."""
        history = History()
        rewritten = stream(
            deepcopy(self.graph_module),
            self.num_forward_outputs,
            self.roles,
            Settings(chunk_size, **settings),
            history,
        )
        assert rewritten is not None, history.unstreamed
        assert not history.barriers, [str(barrier) for barrier in history.barriers]
        rewritten.graph_module.graph.lint()
        return rewritten

    def inputs(self) -> list[Any]:
        """The primals, and tangents of the right shapes."""
        placeholders = self.graph_module.graph.find_nodes(op="placeholder")
        values = [node.meta["val"] for node in placeholders if "tangents" in node.target]
        generator = torch.Generator().manual_seed(0)
        tangents = [
            torch.randn([hint_of(n) for n in value.shape], generator=generator).to(value.dtype)
            for value in values
        ]
        return [*self.primals, *tangents]


def capture(
    program: Callable[..., Any], *inputs: Any, dynamic: Sequence[tuple[int, int]] = ()
) -> Captured:
    """The joint graph of ``program(*inputs)``.

    ``dynamic`` lists ``(input, dim)`` whose size is to be symbolic.
    """
    torch._dynamo.reset()
    found: list[Captured] = []

    def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        normalize_attention(graph_module)
        roles = input_roles(graph_module, example_inputs)

        def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            found.append(Captured(deepcopy(joint), kwargs["num_fwd_outputs"], roles))
            return default_partition(joint, joint_inputs, **kwargs)

        def forward(graph_module: GraphModule, _: Any) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                found[0].primals = list(args)
                return Interpreter(graph_module).boxed_run(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        compiler = aot_autograd(
            fw_compiler=forward,
            partition_fn=partition,
            decompositions=decompositions(),
        )
        return compiler(graph_module, example_inputs)

    for index, dim in dynamic:
        torch._dynamo.mark_dynamic(inputs[index], dim)
    torch.compile(program, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    (captured,) = found
    return captured


def run_graph(graph_module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The flat outputs of a joint graph; its loops run by their reference meaning."""
    interpreter = Interpreter(graph_module)
    return list(interpreter.run(*inputs, enable_io_processing=False))


def assert_same_results(rewritten: Rewritten, captured: Captured, atol: float = 1e-10) -> None:
    """Fail unless the rewritten joint graph returns what the captured one does."""
    inputs = captured.inputs()
    expected = run_graph(captured.graph_module, inputs)
    got = run_graph(rewritten.graph_module, inputs)
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-8)


def bodies(module: GraphModule) -> list[Any]:
    """The body of each loop, in the order of the loops."""
    return [getattr(module, str(node.args[0].target)) for node in loop_nodes(module)]  # type: ignore[union-attr]


def glue(graph_module: GraphModule) -> list[Node]:
    """The tensor-valued calls of a rewritten graph that are neither a loop nor its result."""
    loops = set(loop_nodes(graph_module))
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function"
        and node not in loops
        and not (node.args and node.args[0] in loops)
        and isinstance(node.meta.get("val"), Tensor)
    ]

"""Lower loops: each body goes to Inductor once, whatever the number of loops that share it.

A body is compiled at its first call, outside of AOTAutograd's tracing modes, and below Dynamo, so
that neither a recompile limit nor a length of 1 can add a graph. Where Inductor's code relies on
a fact about sizes that a later call does not satisfy, one more variant is compiled for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from streambp_fx._torch import (
    PythonPrinter,
    TracingContext,
    backed_size_oblivious,
    compile_fx_inner,
    disable_current_modes,
    inductor_config,
    tracing,
)

from .loops import StreamLoop, streambp_loop


@dataclass
class _Variant:
    """Compiled code and the condition on the sizes under which it is right."""

    condition: Callable[..., bool]
    code: Any


@dataclass
class CompiledBody:
    """A loop body that Inductor compiles at its first call.

    ``meta`` is the body graph's, so that a compiled body can stand where the graph stood.
    """

    graph: GraphModule
    settings: dict[str, Any]
    meta: dict[str, Any] = field(default_factory=dict)
    variants: list[_Variant] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meta = self.graph.meta
        self.lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        sizes = [value for value in inputs if isinstance(value, int)]
        for variant in self.variants:
            if variant.condition(*sizes):
                results: Sequence[Any] = variant.code(list(inputs))
                return results
        with self.lock:
            variant = self._compile()
            self.variants.append(variant)
        results = variant.code(list(inputs))
        return results

    def _compile(self) -> _Variant:
        placeholders = self.graph.graph.find_nodes(op="placeholder")
        inputs = [node.meta["val"] for node in placeholders]
        mode = self.graph.meta["fake_mode"]
        with (
            disable_current_modes(),
            torch.no_grad(),
            inductor_config.patch(self.settings),
            backed_size_oblivious(),
            tracing(TracingContext(mode)),
        ):
            code = compile_fx_inner(_copy(self.graph), inputs)
        compile_count.bodies += 1
        names = [str(node.meta["val"]) for node in placeholders if _is_size(node.meta["val"])]
        guards = [guard.expr for guard in mode.shape_env.guards]
        source = " and ".join(f"({PythonPrinter().doprint(guard)})" for guard in guards) or "True"
        condition = eval(f"lambda {', '.join(names)}: {source}", {"math": __import__("math")})
        return _Variant(condition, code)


@dataclass
class CompileCount:
    """How many bodies this process has compiled, for tests and reports."""

    bodies: int = 0


compile_count = CompileCount()


def _copy(graph_module: GraphModule) -> GraphModule:
    """A copy that Inductor's passes may change."""
    import copy

    return GraphModule(graph_module, copy.deepcopy(graph_module.graph))


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


_compiled: dict[Any, CompiledBody] = {}


def lower(graph_module: GraphModule, compile_bodies: bool, settings: dict[str, Any]) -> Callable[..., Any]:
    """A boxed callable that runs a forward or backward graph with loops.

    Glue runs op by op; it is a handful of small ops between loops. Values are dropped after their
    last use.
    """
    if compile_bodies:
        for node in graph_module.graph.find_nodes(op="get_attr"):
            body = getattr(graph_module, str(node.target))
            if isinstance(body, GraphModule) and "loop" in body.meta:
                setattr_body(graph_module, str(node.target), _shared(body, settings))

    def run(args: list[Any]) -> Any:
        return torch.fx.Interpreter(graph_module).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def setattr_body(graph_module: GraphModule, name: str, body: CompiledBody) -> None:
    """Put a compiled body where its graph stood."""
    delattr(graph_module, name)
    setattr(graph_module, name, body)


def _shared(body: GraphModule, settings: dict[str, Any]) -> CompiledBody:
    key = (body.meta["key"], tuple(sorted((name, str(value)) for name, value in settings.items())))
    if key not in _compiled:
        _compiled[key] = CompiledBody(body, settings)
    return _compiled[key]


def loop_nodes(graph_module: GraphModule) -> list[torch.fx.Node]:
    """The loop nodes of a graph, in order."""
    return [node for node in graph_module.graph.nodes if isinstance(node.target, StreamLoop)]


__all__ = ["CompiledBody", "compile_count", "loop_nodes", "lower", "streambp_loop"]

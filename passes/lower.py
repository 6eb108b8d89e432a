"""Lower loops: each body goes to Inductor once, whatever the number of loops that share it.

A body is compiled at its first call, outside of AOTAutograd's tracing modes, and below Dynamo, so
that neither a recompile limit nor a length of 1 can add a graph. Where Inductor's code relies on
a fact about sizes that a later call does not satisfy, one more variant is compiled for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from streambp_fx._torch import (
    PythonPrinter,
    ShapeEnv,
    TracingContext,
    backed_size_oblivious,
    compile_fx_inner,
    disable_current_modes,
    inductor_config,
    tracing,
)

from .body import LoopBody
from .loops import LoopSpec, StreamLoop


@dataclass
class _Variant:
    """Compiled code and the condition on the sizes under which it is right."""

    condition: Callable[..., bool]
    code: Any


class CompiledBody:
    """A loop body that Inductor compiles at its first call."""

    def __init__(self, body: LoopBody, settings: dict[str, Any]) -> None:
        self.body = body
        self.spec = body.spec
        self.settings = settings
        self.variants: list[_Variant] = []
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

    def for_spec(self, spec: LoopSpec) -> CompiledBody:
        """The same code as the body of another loop, whose chunk size or direction may differ."""
        if spec == self.spec:
            return self
        other = CompiledBody(self.body, self.settings)
        other.spec, other.variants, other.lock = spec, self.variants, self.lock
        return other

    def _compile(self) -> _Variant:
        code, inputs, env = through_inductor(self.body, self.settings)
        compile_count.bodies += 1
        sizes = [value for value in inputs if isinstance(value, torch.SymInt)]
        return _Variant(_condition(sizes, env), code)


def through_inductor(
    body: LoopBody, settings: dict[str, Any]
) -> tuple[Any, list[Any], ShapeEnv | None]:
    """What Inductor makes of ``body``, the fake inputs that it was traced with, and their sizes."""
    graph_module, mode = body.trace()
    inputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    with (
        disable_current_modes(),
        torch.no_grad(),
        inductor_config.patch(settings),
        backed_size_oblivious(),
        tracing(TracingContext(mode)),
    ):
        code = compile_fx_inner(graph_module, inputs)
    return code, inputs, mode.shape_env


def _condition(sizes: list[torch.SymInt], env: ShapeEnv | None) -> Callable[..., bool]:
    """A test of the facts about sizes that the compiled code relies on."""
    names = [str(size.node.expr) for size in sizes]
    facts = [f"({PythonPrinter().doprint(guard.expr)})" for guard in (env.guards if env else ())]
    source = f"lambda {', '.join(names)}: {' and '.join(facts) or 'True'}"
    condition: Callable[..., bool] = eval(source, {"math": math})
    return condition


@dataclass
class CompileCount:
    """How many bodies this process has compiled, for tests and reports."""

    bodies: int = 0


compile_count = CompileCount()


_compiled: dict[Any, CompiledBody] = {}

interpreter: ContextVar[Callable[[GraphModule], torch.fx.Interpreter]] = ContextVar(
    "interpreter", default=torch.fx.Interpreter
)
"""What runs graphs. Memory is predicted by one that computes nothing."""


def lower(
    graph_module: GraphModule, compile_bodies: bool, settings: dict[str, Any]
) -> Callable[..., Any]:
    """A boxed callable that runs a forward or backward graph with loops.

    Glue runs op by op; it is a handful of small ops between loops. Values are dropped after their
    last use. `interpreter` says how.
    """
    if compile_bodies:
        for node in graph_module.graph.find_nodes(op="get_attr"):
            body = getattr(graph_module, str(node.target))
            if isinstance(body, LoopBody):
                setattr(graph_module, str(node.target), _shared(body, settings))

    def run(args: list[Any]) -> Any:
        return interpreter.get()(graph_module).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _shared(body: LoopBody, settings: dict[str, Any]) -> CompiledBody:
    """The compiled body of this process for a body's key, with the loop's own spec."""
    key = (body.key, tuple(sorted((name, str(value)) for name, value in settings.items())))
    compiled = _compiled.setdefault(key, CompiledBody(body, settings))
    return compiled.for_spec(body.spec)


def loop_nodes(graph_module: GraphModule) -> list[torch.fx.Node]:
    """The loop nodes of a graph, in order."""
    return [node for node in graph_module.graph.nodes if isinstance(node.target, StreamLoop)]

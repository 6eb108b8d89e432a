"""Get the loop bodies of a program without running it or allocating its weights.

The program is traced on fake CPU tensors and rewritten as the backend does. Autograd of a torch
build without CUDA can not handle CUDA tensors, not even fake ones; the passes, though, ask no value
for its device, so that a body for a GPU is the CPU's with the devices exchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from streambp_fx._torch import FakeTensorMode, ShapeEnv, pytree
from streambp_fx.backend import Compilation
from streambp_fx.options import Options
from streambp_fx.passes.body import BodyPlan, LoopBody
from streambp_fx.passes.lower import loop_nodes


def capture_bodies(
    program: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> dict[str, LoopBody]:
    """The body of each loop by the loop's name, in the order of the loops.

    Args:
        program: a module, or a function of modules and tensors.
        args, kwargs: its arguments. Only shapes, strides and dtypes of tensors matter; those on
            the meta device will do. Modules are copied with fake parameters.
        options: of the backend.

    Loops of a second graph (after a graph break) are called ``graph1.segment0`` and so on.
    """
    compilations: list[Compilation] = []
    uncompiled = dataclasses.replace(options, compile_bodies=False)

    def backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # What runs is the graph as Dynamo gave it: the passes change theirs, and a loop over the
        # chunks of a long sequence takes minutes on fake tensors.
        original = copy.deepcopy(graph_module)
        compilation = Compilation(uncompiled)
        compilation.compile(graph_module, inputs)
        compilations.append(compilation)
        return original.forward

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        memo: dict[int, Any] = {}
        program, args, kwargs = pytree.tree_map(
            lambda leaf: _fake(leaf, memo), (program, tuple(args), dict(kwargs))
        )
        torch.compile(_with_own_cache(program), backend=backend, dynamic=False)(*args, **kwargs)
    bodies: dict[str, LoopBody] = {}
    for index, compilation in enumerate(compilations):
        rewritten = compilation.history.graphs.get("rewritten")
        for node in loop_nodes(rewritten) if rewritten is not None else ():
            name = node.meta["loop"].name
            body = getattr(rewritten, str(node.args[0].target))  # type: ignore[union-attr]
            bodies[f"graph{index}.{name}" if index else name] = body
    return bodies


def on_device(body: LoopBody, device: torch.device) -> LoopBody:
    """``body`` with every tensor of it on ``device``."""
    moved = copy.copy(body)
    moved.plan = _plan_on_device(body.plan, device)
    moved.key = moved.plan.key()
    return moved


def _plan_on_device(plan: BodyPlan, device: torch.device) -> BodyPlan:
    def move(args: Any) -> Any:
        return map_aggregate(args, lambda arg: device if isinstance(arg, torch.device) else arg)

    return dataclasses.replace(
        plan,
        calls=[
            dataclasses.replace(call, args=move(call.args), kwargs=dict(move(call.kwargs)))
            for call in plan.calls
        ],
        metas=[
            dataclasses.replace(meta, device=None if meta.device is None else device)
            for meta in plan.metas
        ],
    )


def _fake(leaf: Any, memo: dict[int, Any]) -> Any:
    """A tensor or module without data like ``leaf``; other values are themselves."""
    if isinstance(leaf, torch.nn.Module):
        for tensor in (*leaf.parameters(), *leaf.buffers()):
            memo.setdefault(id(tensor), _fake_tensor(tensor))
        return copy.deepcopy(leaf, memo)
    if isinstance(leaf, torch.Tensor):
        return memo.setdefault(id(leaf), _fake_tensor(leaf))
    return leaf


def _fake_tensor(tensor: torch.Tensor) -> torch.Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(like, tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad)


def _with_own_cache(program: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``program``, with a code object of its own.

    Dynamo counts and keeps compiled graphs by code object: those of this one are gone with it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    return FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__
    )

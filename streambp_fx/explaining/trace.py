"""Compile a program with the backend on tensors without data, and keep what the passes did.

Given:  a model or function and its arguments, real or on the meta device
Result: the passes' `History` of each graph that Dynamo captures

Nothing is run and no weight is allocated: modules are copied with fake parameters, and between
graphs the program goes on with fake values.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.fx import GraphModule

from streambp_fx._torch import FakeTensorMode, ShapeEnv, pytree

from ..backend import Compilation
from ..options import Options
from ..passes.pipeline import History


def trace(
    program: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    on_graph: Callable[[History], object] = lambda history: None,
) -> list[History]:
    """What the backend makes of ``program(*args, **kwargs)``, graph by graph.

    Args:
        program: a module, or a function of modules and tensors. Modules that a function closes
            over are traced as they are: only arguments are replaced by fakes.
        args, kwargs: its arguments. Only shapes, strides and dtypes of tensors matter, and whether
            they are on the CPU, for the choice of chunk sizes.
        options: of the backend.
        on_graph: called after the passes of each graph.
    """
    histories: list[History] = []
    # Whatever a program is on, fake tensors on the CPU stand for its own.
    for_accelerator = not _all_on_cpu((program, args, kwargs))
    as_planned = dataclasses.replace(options, compile_bodies=False, segments=False)

    def backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # What runs is the graph as Dynamo gave it: the passes change theirs, and a loop over the
        # chunks of a long sequence takes minutes on fake tensors.
        with warnings.catch_warnings():
            # Of pytree's, about a class of what Dynamo notes beside its graph.
            warnings.simplefilter("ignore", FutureWarning)
            original = copy.deepcopy(graph_module)
        compilation = Compilation(as_planned, for_accelerator=for_accelerator)
        compilation.history.keep_copies = True
        compilation.compile(graph_module, inputs)
        histories.append(compilation.history)
        on_graph(compilation.history)
        return original.forward

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        program, args, kwargs = without_data((program, tuple(args), dict(kwargs)))
        torch.compile(with_own_cache(program), backend=backend, dynamic=False)(*args, **kwargs)
    return histories


def _all_on_cpu(tree: Any) -> bool:
    """Whether all tensors of a tree are; those without data (``meta``) stand for a GPU's."""
    return all(tensor.device.type == "cpu" for tensor in tensors_of(tree))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree, and the parameters and buffers of its modules."""
    leaves = pytree.tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for module in [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]:
        tensors += [*module.parameters(), *module.buffers()]
    return tensors


def without_data(tree: Any) -> Any:
    """``tree`` with fake copies of its tensors and modules; one that appears twice stays one.

    To be called under the `FakeTensorMode` that the copies shall be of.
    """
    memo: dict[int, Any] = {}
    return pytree.tree_map(lambda leaf: _fake(leaf, memo), tree)


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


def with_own_cache(program: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``program``, with a code object of its own.

    Dynamo counts and keeps compiled graphs by code object: those of this one are gone with it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return program(*args, **kwargs)

    return FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__
    )

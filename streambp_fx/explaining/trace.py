"""Compile a program with the backend on tensors without data, and keep what the passes did.

Given:  a model or function and its arguments, real or on the meta device
Result: what the passes did with each graph that Dynamo captures, and a step that can be run on
        tensors without data

Nothing is computed and no weight is allocated: modules are copied with fake parameters.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from streambp_fx._torch import FakeTensorMode, ShapeEnv, pytree

from ..backend import Compilation
from ..options import Options
from ..passes.pipeline import History
from ..passes.placement import hint_of
from .body_memory import Workspace
from .loss import NoLossError, loss_of
from .step_memory import StepMemory, StepRecorder


class Traced:
    """A compiled step on tensors without data.

    captures
        The compilation of each graph that Dynamo captured.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Options,
        on_graph: Callable[[], object] = lambda: None,
        *,
        keeps_gradients: bool = True,
    ) -> None:
        """Compile ``program(*args, **kwargs)``.

        Args:
            program: a module, or a function of modules and tensors. Modules that a function closes
                over are traced as they are: only arguments are replaced by fakes.
            args, kwargs: its arguments. Only shapes, strides and dtypes of tensors matter, and
                whether they are on the CPU, for the choice of chunk sizes.
            options: of the backend.
            on_graph: called after the passes of each graph.
            keeps_gradients: whether gradients are there when a step starts, as when they are not
                set to ``None`` after the last one.
        """
        self.captures: list[Compilation] = []
        # Whatever a program is on, fake tensors on the CPU stand for its own.
        for_accelerator = not _all_on_cpu((program, args, kwargs))
        options = dataclasses.replace(options, compile_bodies=False)

        def backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compilation = Compilation(options, for_accelerator=for_accelerator)
            compilation.history.keep_copies = True
            compiled = compilation.compile(graph_module, inputs)
            self.captures.append(compilation)
            self._recorder.expect(compilation.segments)
            on_graph()
            return lambda *given: self._recorded(compiled, given)

        self._mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with self._mode:
            program, self._args, self._kwargs = without_data((program, tuple(args), dict(kwargs)))
            self._tensors = tensors_of((program, self._args, self._kwargs))
            if keeps_gradients:
                self._tensors += _new_gradients(self._tensors)
        self._keeps_gradients = keeps_gradients
        self._compiled = torch.compile(with_own_cache(program), backend=backend, dynamic=False)
        self._recorder = StepRecorder(lambda body, inputs: 0, self._tensors)
        self._step()

    def memory(self, workspace: Workspace) -> StepMemory:
        """What is alive at each moment of a step."""
        self._recorder = StepRecorder(workspace, self._tensors)
        for capture in self.captures:
            self._recorder.expect(capture.segments)
        self._step()
        return self._recorder.memory

    def _recorded(self, compiled: Callable[..., Any], given: Sequence[Any]) -> Any:
        with self._recorder.on():
            return compiled(*given)

    def _step(self) -> None:
        with self._mode, self._recorder.recording():
            _backward(_roots(self._compiled(*self._args, **self._kwargs)), self._recorder)
        if not self._keeps_gradients:
            for tensor in self._tensors:
                tensor.grad = None


def predict(
    compiled: Callable[..., Any],
    inputs: Sequence[Any],
    segments: Sequence[History],
    workspace: Workspace,
) -> StepMemory:
    """The memory of a step of one graph that the backend has compiled.

    Args:
        compiled, inputs: what the backend returns, and the inputs that it was given.
        segments: what was found in the graph's segments, in order.
        workspace: the memory of a body's call.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        given = [_fake_input(value) for value in inputs]
        tensors = [value for value in given if isinstance(value, Tensor)]
        recorder = StepRecorder(workspace, tensors + _new_gradients(tensors))
        recorder.expect(segments)
        with recorder.recording():
            with recorder.on():
                roots = _roots(compiled(*given))
            _backward(roots, recorder)
    return recorder.memory


def _fake_input(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape, stride = tuple(map(hint_of, value.shape)), tuple(map(hint_of, value.stride()))
        like = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return like.requires_grad_(value.requires_grad)
    return hint_of(value) if isinstance(value, torch.SymInt) else value


def _new_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate the gradients of leaves, as after a first step."""
    leaves = [one for one in tensors if one.requires_grad and torch.is_grad_enabled()]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _backward(roots: list[Tensor], recorder: StepRecorder) -> None:
    """Outputs other than the roots are gone by now, as with ``model(...).loss.backward()``."""
    with recorder.on():
        recorder.backward = True
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _roots(outputs: Any) -> list[Tensor]:
    """What backward starts from: the loss, or all outputs with a gradient if there is none."""
    try:
        loss = loss_of(outputs)
    except NoLossError:
        return [
            leaf
            for leaf in pytree.tree_leaves(outputs)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
    return [] if loss is None else [loss]


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

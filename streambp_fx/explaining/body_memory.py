"""The memory that one call of a loop's body takes, found without computing anything.

Given:  a body, and fake tensors for its operands
Result: the most bytes that it has allocated at a time, its results among them

A body that runs op by op is run on the fake tensors. For a compiled one, the wrapper code that
Inductor writes around its kernels is run on them, with kernels that do nothing: what it allocates,
reuses and deletes is what the compiled body does.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from streambp_fx._torch import active_fake_mode, disable_current_modes

from ..passes.body import LoopBody
from ..passes.lower_only import lower_only
from .allocations import peak_of

Workspace = Callable[[LoopBody, Sequence[Any]], int]
"""``workspace(body, inputs)``: the most bytes that one call of a body allocates, results too."""


def eager_workspace(body: LoopBody, inputs: Sequence[Any]) -> int:
    """The most bytes of a call of ``body`` that runs op by op."""
    # Under a recorder's mode too, each op would be counted twice.
    mode = active_fake_mode()
    with disable_current_modes(), mode or nullcontext():
        return peak_of(lambda: body(*inputs), _tensors(inputs))


def remembered(workspace: Workspace) -> Workspace:
    """``workspace``, asked once for a body and inputs of one kind."""
    known: dict[Any, int] = {}

    def found(body: LoopBody, inputs: Sequence[Any]) -> int:
        shapes = [value.shape if isinstance(value, Tensor) else value for value in inputs]
        key = (body.key, *shapes)
        if key not in known:
            known[key] = workspace(body, inputs)
        return known[key]

    return found


class CompiledWorkspace:
    """The most bytes of a call of a body that Inductor compiled; each body is lowered once."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._calls: dict[Any, Callable[[list[Any]], Any]] = {}

    def __call__(self, body: LoopBody, inputs: Sequence[Any]) -> int:
        if body.key not in self._calls:
            _, source, _ = lower_only(body, self._settings)
            self._calls[body.key] = without_kernels(source)
        call = self._calls[body.key]
        return peak_of(lambda: call(list(inputs)), _tensors(inputs))


class _Nothing:
    """Stands for kernels, checks and streams: it can be called, and does nothing."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None

    def __getattr__(self, name: str) -> _Nothing:
        return self


class _ExternKernels(_Nothing):
    """Kernels that are called rather than written: those that make their result are run."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._run, getattr(torch, name, None))

    @staticmethod
    def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
        fills = function is None or kwargs.get("out") is not None
        return kwargs.get("out") if fills else function(*args, **kwargs)


def without_kernels(source: str) -> Callable[[list[Any]], Any]:
    """The function ``call(args)`` of a wrapper, with kernels that do nothing.

    Raises:
        ValueError: there is no such function in ``source``.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    call = next((function for function in functions if function.name == "call"), None)
    if call is None:
        raise ValueError("the wrapper code has no function 'call'")
    call.args.args = call.args.args[-1:]  # it is a method, which reads nothing of its object
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    namespace: dict[str, Any] = {name: _Nothing() for name in names if not hasattr(builtins, name)}
    namespace.update(
        torch=torch,
        aten=torch.ops.aten,
        extern_kernels=_ExternKernels(),
        empty_strided_cpu=_empty_strided,
        reinterpret_tensor=_reinterpret,
    )
    exec(compile(ast.Module([call], []), "<wrapper>", "exec"), namespace)
    function: Callable[[list[Any]], Any] = namespace["call"]
    return function


def _empty_strided(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _reinterpret(
    tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    return tensor.as_strided(shape, stride, offset)


def _tensors(inputs: Sequence[Any]) -> list[Tensor]:
    return [value for value in inputs if isinstance(value, Tensor)]

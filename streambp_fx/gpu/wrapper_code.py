"""Read the wrapper code that Inductor writes around its kernels.

The wrapper is Python: kernels as strings at the top level, then a function that allocates buffers,
launches kernels, calls ops that are not generated (externs), and deletes what is no longer needed.
From its statements follows which buffers are alive at a time; their sizes are Inductor's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

ALLOCATE = "empty_strided_cuda"
VIEW = "reinterpret_tensor"


@dataclass(frozen=True)
class Buffer:
    """A tensor of a lowered body; ``shape`` is in terms of the body's sizes."""

    name: str
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    def dims(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where the body's sizes are ``sizes``, by name.

        Raises:
            KeyError: ``sizes`` lacks one.
        """
        return tuple(
            int(size.subs({symbol: sizes[str(symbol)] for symbol in size.free_symbols}))
            for size in self.shape
        )

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes where the body's sizes are ``sizes``."""
        count = self.dtype.itemsize
        for size in self.dims(sizes):
            count *= size
        return count


@dataclass(frozen=True)
class Launch:
    """A Triton kernel that the wrapper launches, and the tensors that it is given."""

    kernel: str
    tensors: tuple[Buffer, ...]


@dataclass(frozen=True)
class Wrapper:
    """What a wrapper does.

    kernels
        Triton source by name.
    launches, externs
        Kernels launched and other ops called, in order.
    buffers
        What it allocates, in order; the body's operands and results of other bodies are not.
    alive
        The names of the allocated buffers that are alive after each statement that changes them.
    """

    kernels: dict[str, str]
    launches: tuple[Launch, ...]
    externs: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    alive: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Tensors:
    """What is known of the tensors that a wrapper names.

    buffers, operands
        By name.
    parts
        For an op that returns several tensors: the buffers of its results, by index.
    """

    buffers: Mapping[str, Buffer]
    operands: Mapping[str, Buffer]
    parts: Mapping[str, Mapping[int | None, Buffer]]


def read_wrapper(source: str, tensors: Tensors) -> Wrapper:
    """Take a wrapper's source apart.

    Raises:
        ValueError: there is no function ``call`` in it.
    """
    tree = ast.parse(source)
    call = next(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "call"
        ),
        None,
    )
    if call is None:
        raise ValueError("the wrapper code has no function 'call'")
    reader = _Reader(tensors)
    for statement in _statements(call.body):
        reader.read(statement)
    return Wrapper(
        _kernels(tree),
        tuple(reader.launches),
        tuple(reader.externs),
        tuple(reader.allocated.values()),
        tuple(reader.alive),
    )


def _kernels(tree: ast.Module) -> dict[str, str]:
    """``name = async_compile.triton('name', '''source''', ...)``."""
    found = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "async_compile.triton"
        ):
            name, kernel = (ast.literal_eval(arg) for arg in node.value.args[:2])
            found[name] = kernel
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in the order in which they run; the wrapper has no branches."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


class _Reader:
    """Follows which names hold which buffers."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.held: dict[str, frozenset[str]] = {}
        self.allocated: dict[str, Buffer] = {}
        self.launches: list[Launch] = []
        self.externs: list[str] = []
        self.alive: list[frozenset[str]] = [frozenset()]

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                self.held.pop(ast.unparse(target), None)
        elif isinstance(statement, ast.Assign):
            self._assign(ast.unparse(statement.targets[0]), statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._call(statement.value)
        alive = frozenset().union(*self.held.values())
        if alive != self.alive[-1]:
            self.alive.append(alive)

    def _assign(self, name: str, value: ast.expr) -> None:
        source, index = _source_of(value)
        if source in self.held:
            parts = self.tensors.parts.get(source, {})
            self.held[name] = (
                frozenset([parts[index].name]) if index in parts else self.held[source]
            )
        elif isinstance(value, ast.Call):
            self._call(value)
            self.held[name] = self._results(name)
            if not self.held[name]:
                del self.held[name]

    def _results(self, name: str) -> frozenset[str]:
        """The buffers that a call allocates, whose result is called ``name``."""
        if name in self.tensors.parts:
            made = list(self.tensors.parts[name].values())
        elif name in self.tensors.buffers:
            made = [self.tensors.buffers[name]]
        else:
            made = []
        self.allocated.update({buffer.name: buffer for buffer in made})
        return frozenset(buffer.name for buffer in made)

    def _call(self, call: ast.Call) -> None:
        function = ast.unparse(call.func)
        if function.endswith(".run"):
            self.launches.append(Launch(function.removesuffix(".run"), self._tensors_of(call)))
        elif function.startswith(("extern_kernels.", "torch.ops.", "aten.")):
            self.externs.append(function)

    def _tensors_of(self, call: ast.Call) -> tuple[Buffer, ...]:
        names = [_source_of(arg)[0] for arg in call.args]
        known = {**self.tensors.operands, **self.tensors.buffers}
        return tuple(known[name] for name in names if name in known)


def _source_of(value: ast.expr) -> tuple[str, Any]:
    """The name that ``value`` is a view or an item of, and the item's index."""
    if isinstance(value, ast.Name):
        return value.id, None
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        return ast.unparse(value.value), value.slice.value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == VIEW:
        return _source_of(value.args[0])
    return "", None

"""Write down the body of a loop: which ops run for a chunk, on which operands.

A `BodyPlan` is a list of calls that name their inputs by number, with every size that depends on
the chunk left open. Two loops whose plans have equal keys share one traced and compiled body, so
the layers of a model cost one body however many they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from streambp_fx._torch import FakeTensorMode

from .extents import ExtentChange
from .loops import Along, LoopSpec, Operand, Result
from .placement import Extent, Streamed, value_of
from .rules.sizes import expr_of
from .rules.spec import Resize


@dataclass(frozen=True)
class Ref:
    """The result of a call (``call``) or an operand of the loop (``operand``), by number."""

    kind: str
    index: int


@dataclass(frozen=True)
class SizeArg:
    """A size, or a number computed from sizes, that depends on outer symbols alone."""

    expr: Any


@dataclass(frozen=True)
class OffsetArg:
    """The chunk's first token."""


@dataclass(frozen=True)
class LengthArg:
    """The chunk's length in tokens."""


@dataclass(frozen=True)
class Shape:
    """A result's shape for a chunk: ``at`` tells which dim varies, ``dims`` the others."""

    dims: tuple[Any, ...]
    at: Streamed | None
    dtype: torch.dtype | None = None

    def key(self) -> tuple[Any, ...]:
        """Hashable identity."""
        return (tuple(map(str, self.dims)), self.at.key() if self.at else None, self.dtype)


@dataclass
class BodyCall:
    """One op of the body.

    resize, letter
        Which arguments change for a chunk of ``letter``.
    change
        A slice or pad along the streamed axis, in place of the op itself.
    source
        Where what is sliced or padded runs along the sequence.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Shape | None, ...]
    resize: Resize | None = None
    letter: str | None = None
    change: ExtentChange | None = None
    source: Streamed | None = None

    def reads(self) -> list[int]:
        """The calls whose results this one takes."""
        found: list[int] = []

        def visit(arg: Any) -> None:
            if isinstance(arg, Ref) and arg.kind == "call":
                found.append(arg.index)
            elif isinstance(arg, (tuple, list)):
                for item in arg:
                    visit(item)

        visit(self.args)
        visit(list(self.kwargs.values()))
        return found

    def key(self) -> tuple[Any, ...]:
        """Hashable identity."""
        return (
            str(self.target),
            _freeze(self.args),
            _freeze(self.kwargs),
            tuple(shape.key() if shape else None for shape in self.shapes),
            self.resize is not None,
            self.letter,
            self.change,
            self.source.key() if self.source else None,
        )


@dataclass(frozen=True)
class OperandMeta:
    """What a body must know of an operand to be traced; ``at`` for one passed by chunk."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...] | None
    dtype: torch.dtype | None
    device: torch.device | None
    at: Streamed | None

    def key(self) -> tuple[Any, ...]:
        """Hashable identity."""
        return (
            tuple(map(str, self.shape)),
            None if self.stride is None else tuple(map(str, self.stride)),
            self.dtype,
            str(self.device),
            self.at.key() if self.at else None,
        )


@dataclass
class BodyPlan:
    """The calls, operands and results of one loop body."""

    calls: list[BodyCall] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    metas: list[OperandMeta] = field(default_factory=list)
    values: list[Node] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    symbols: list[str] = field(default_factory=list)

    def key(self) -> tuple[Any, ...]:
        """Equal for two plans exactly if they are the same program."""
        return (
            tuple(call.key() for call in self.calls),
            tuple(self.operands),
            tuple(meta.key() for meta in self.metas),
            tuple(self.outputs),
            tuple(self.results),
            tuple(self.symbols),
        )

    def extents(self) -> tuple[Extent, ...]:
        """Every extent that a shape of the body mentions; the full one comes first."""
        found: dict[Extent, None] = {Extent(): None}
        for call in self.calls:
            for shape in call.shapes:
                if shape is not None and shape.at is not None:
                    found[shape.at.extent] = None
        for operand in self.operands:
            if operand.along is not None:
                found[operand.along.extent] = None
        return tuple(found)

    def last_uses(self) -> dict[int, tuple[int, ...]]:
        """For each call, the results that nothing reads after it."""
        last: dict[int, int] = {}
        for index, call in enumerate(self.calls):
            last[index] = index
            for ref in call.reads():
                last[ref] = index
        for output in self.outputs:
            if output.kind == "call":
                last.pop(output.index, None)
        uses: dict[int, list[int]] = {}
        for index, user in last.items():
            uses.setdefault(user, []).append(index)
        return {user: tuple(indices) for user, indices in uses.items()}

    def add_call(self, call: BodyCall) -> Ref:
        """Append a call and return its result."""
        self.calls.append(call)
        return Ref("call", len(self.calls) - 1)

    def add_operand(self, value: Node, at: Streamed | None, mutated: bool = False) -> Ref:
        """Append an operand: the new graph's ``value``, passed whole or by chunk."""
        fake = value_of(value)
        along = None if at is None else along_of(at)
        if isinstance(fake, torch.Tensor):
            stride = None if at is not None else tuple(map(size_key, fake.stride()))
            meta = OperandMeta(
                tuple(map(size_key, fake.shape)), stride, fake.dtype, fake.device, at
            )
        else:
            meta = OperandMeta((), None, None, None, None)
        self.operands.append(Operand(along, mutated))
        self.metas.append(meta)
        self.values.append(value)
        return Ref("operand", len(self.operands) - 1)


class LoopBody:
    """The body of a loop node: runs its plan, and yields its graph when asked to.

    spec
        How operands go in and results come out.
    key
        Equal for bodies that may share compiled code.
    """

    def __init__(self, plan: BodyPlan, spec: LoopSpec, hints: dict[str, int], chunk: int) -> None:
        self.plan = plan
        self.spec = spec
        self.key = plan.key()
        self._hints = hints
        self._chunk = chunk

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        from .run_plan import run_plan

        return run_plan(self.plan, *inputs)

    def __deepcopy__(self, memo: object) -> LoopBody:
        """Copies of a graph share its bodies, which never change."""
        return self

    def trace(self) -> tuple[GraphModule, FakeTensorMode]:
        """The graph of one chunk with symbolic sizes, and the mode that owns the sizes."""
        from .trace_body import trace_body

        return trace_body(self.plan, self._chunk, self._hints)


def along_of(at: Streamed) -> Along:
    """What the loop driver needs of a position.

    Raises:
        ValueError: the factor inside the streamed axis is symbolic.
    """
    inner = expr_of(at.inner)
    if not inner.is_number:
        raise ValueError(f"a symbolic size {inner} lies inside the sequence axis")
    return Along(at.dim, int(inner), at.extent)


def size_key(size: Any) -> Any:
    """A size, or a float computed from sizes, as a number or a sympy expression."""
    if isinstance(size, torch.SymFloat):
        return float(size.node.expr) if size.node.expr.is_number else size.node.expr
    expr = expr_of(size)
    return int(expr) if expr.is_number else expr


def map_args(args: Any, change: Callable[[Node], Any]) -> Any:
    """``args`` with every node replaced by ``change(node)``."""
    return torch.fx.node.map_aggregate(
        args, lambda arg: change(arg) if isinstance(arg, Node) else arg
    )


def _freeze(args: Any) -> Any:
    if isinstance(args, (list, tuple)):
        return tuple(_freeze(arg) for arg in args)
    if isinstance(args, dict):
        return tuple((name, _freeze(arg)) for name, arg in args.items())
    if isinstance(args, float):
        return repr(args)  # nan equals itself here
    if isinstance(args, (bool, int, str, Ref, OffsetArg, LengthArg, type(None))):
        return (type(args).__name__, args)
    return str(args)

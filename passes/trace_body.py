"""Trace a `BodyPlan` into a graph whose chunk sizes are symbols.

Given:  calls with open sizes, e.g. ``view(%0, [B, chunk, 8, 64])``
Result: a GraphModule over ``(offset, size, ..., operands)`` where ``size`` is a SymInt

The shape environment is the body's own, so nothing here can add a guard to the user's graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx._torch import (
    DimDynamic,
    FakeTensorMode,
    PythonReferenceAnalysis,
    ShapeEnv,
    backed_size_oblivious,
    constant_source,
    sympy_interp,
)

from .body import BodyCall, BodyPlan, OperandMeta, Ref, Shape
from .placement import FULL, Extent, Streamed, expr_of, product
from .rules.spec import Chunk

aten = torch.ops.aten
RESHAPED = {aten.view.default, aten._unsafe_view.default}


class BodySizes:
    """The sizes of one traced body: a symbol for each open size."""

    def __init__(self, plan: BodyPlan, hints: dict[str, int], chunk_hint: int) -> None:
        self.shape_env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.offset: dict[Extent, Any] = {}
        self.size: dict[Extent, Any] = {}
        self.inputs: list[Any] = []
        for number, extent in enumerate(plan.extents()):
            hint = max(2, chunk_hint - extent.hi if extent != FULL else chunk_hint)
            self.offset[extent] = self._symbol(f"offset{number}", chunk_hint + 3)
            self.size[extent] = self._symbol(f"size{number}", hint)
            self.inputs += [self.offset[extent], self.size[extent]]
        self.symbols = {name: self._symbol(name, hints[name]) for name in plan.symbols}

    def _symbol(self, name: str, hint: int) -> Any:
        source = constant_source(name)
        symbol = self.shape_env.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        return self.shape_env.create_symintnode(symbol, hint=hint, source=source)

    def evaluate(self, expr: Any) -> Any:
        """An outer size (int or sympy expression over outer symbols) as a body size."""
        if isinstance(expr, int):
            return expr
        if isinstance(expr, sympy.Expr) and expr.is_number:
            return int(expr)
        symbols = {symbol: self.symbols[str(symbol)] for symbol in expr.free_symbols}
        return sympy_interp(PythonReferenceAnalysis, symbols, expr)

    def chunk_dim(self, at: Streamed) -> Any:
        """The size of the dim that holds the streamed axis, for one chunk."""
        outer, inner = self.evaluate(expr_of(at.outer)), self.evaluate(expr_of(at.inner))
        return product((outer, self.size[at.extent], inner))

    def shape(self, dims: tuple[Any, ...], at: Streamed | None) -> tuple[Any, ...]:
        """``dims`` with the streamed one replaced by the chunk's."""
        return tuple(
            self.chunk_dim(at) if at is not None and dim == at.dim else self.evaluate(size)
            for dim, size in enumerate(dims)
        )

    def first(self, extent: Extent) -> Any:
        """The first position, on the whole axis, of this chunk's part of ``extent``."""
        return self.offset[extent] + extent.lo


def trace_body(plan: BodyPlan, hints: dict[str, int], chunk_hint: int) -> GraphModule:
    """The graph of one chunk.

    Args:
        plan: what to trace.
        hints: example values of the outer symbols.
        chunk_hint: example chunk length, in tokens.
    """
    with backed_size_oblivious():
        sizes = BodySizes(plan, hints, chunk_hint)
        mode = FakeTensorMode(shape_env=sizes.shape_env, allow_non_fake_inputs=False)
        with mode:
            operands = [_fake_operand(sizes, meta, plan, n) for n, meta in enumerate(plan.metas)]
        count = len(sizes.inputs)

        def body(*inputs: Any) -> tuple[Any, ...]:
            sizes_in, operands_in = inputs[:count], inputs[count:]
            return _run(plan, _rebind(sizes, plan, sizes_in, operands_in), operands_in)

        with mode, contextlib.ExitStack():
            graph_module = make_fx(body, decomposition_table=BODY_DECOMPOSITIONS)(
                *sizes.inputs, *operands
            )
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    graph_module.meta["fake_mode"] = mode
    return graph_module


BODY_DECOMPOSITIONS: dict[Any, Any] = {}
"""Ops of ours that are spelled out in bodies so that Inductor can fuse them."""


def _fake_operand(sizes: BodySizes, meta: OperandMeta, plan: BodyPlan, index: int) -> Any:
    if meta.dtype is None:
        return sizes.symbols[str(plan_symbol(plan, index))]
    shape = sizes.shape(meta.shape, meta.at)
    if meta.stride is None:
        return torch.empty(shape, dtype=meta.dtype, device=meta.device)
    stride = tuple(sizes.evaluate(size) for size in meta.stride)
    return torch.empty_strided(shape, stride, dtype=meta.dtype, device=meta.device)


def plan_symbol(plan: BodyPlan, index: int) -> sympy.Expr:
    """The outer symbol that operand ``index`` carries."""
    return plan.values[index].meta["val"].node.expr


def _rebind(
    sizes: BodySizes, plan: BodyPlan, sizes_in: tuple[Any, ...], operands_in: tuple[Any, ...]
) -> BodySizes:
    """The same sizes, read from the traced inputs so that the graph refers to them."""
    bound = object.__new__(BodySizes)
    bound.shape_env = sizes.shape_env
    bound.offset = dict(zip(sizes.offset, sizes_in[::2], strict=True))
    bound.size = dict(zip(sizes.size, sizes_in[1::2], strict=True))
    bound.inputs = list(sizes_in)
    bound.symbols = {
        str(plan_symbol(plan, index)): operands_in[index]
        for index, meta in enumerate(plan.metas)
        if meta.dtype is None
    }
    return bound


def _run(plan: BodyPlan, sizes: BodySizes, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    results: list[Any] = []

    def resolve(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return results[arg.index] if arg.kind == "call" else operands[arg.index]
        if isinstance(arg, SizeArg):
            return sizes.evaluate(arg.expr)
        if isinstance(arg, OffsetArg):
            return sizes.offset[FULL]
        if isinstance(arg, LengthArg):
            return sizes.size[FULL]
        if isinstance(arg, (tuple, list)):
            return type(arg)(resolve(item) for item in arg)
        return arg

    for call in plan.calls:
        args = tuple(resolve(arg) for arg in call.args)
        kwargs = {name: resolve(arg) for name, arg in call.kwargs.items()}
        results.append(_run_call(call, sizes, args, kwargs))
    return tuple(
        results[ref.index] if ref.kind == "call" else operands[ref.index] for ref in plan.outputs
    )


def _run_call(
    call: BodyCall, sizes: BodySizes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if call.change is not None:
        return _change_extent(call, sizes, args)
    if call.rebuild is not None and call.letter is not None:
        shapes = [None if shape is None else _sizes_of(shape, sizes) for shape in call.shapes]
        at = next(shape.at for shape in call.shapes if shape is not None and shape.at is not None)
        chunk = Chunk(call.letter, sizes.offset[at.extent], sizes.size[at.extent])
        args, kwargs = call.rebuild(args, kwargs, shapes, chunk)
    target = aten.reshape.default if call.target in RESHAPED else call.target
    return target(*args, **kwargs)


def _sizes_of(shape: Shape, sizes: BodySizes) -> tuple[Any, ...]:
    return sizes.shape(shape.dims, shape.at)


def _change_extent(call: BodyCall, sizes: BodySizes, args: tuple[Any, ...]) -> Any:
    """Slice a chunk to the part inside a narrower extent, or pad it to a wider one."""
    if call.change is None or call.source is None:
        raise ValueError("a change of extent needs its source's position")
    narrow, wide = call.change.extent, call.source.extent
    value, dim = args[call.change.source], call.source.dim
    shift = sizes.first(narrow) - sizes.first(wide) if narrow.lo != wide.lo else 0
    if call.change.fill is None:
        return aten.slice.Tensor(value, dim, shift, shift + sizes.size[narrow])
    before = sizes.first(wide) - sizes.first(narrow) if narrow.lo != wide.lo else 0
    after = sizes.size[narrow] - sizes.size[wide] - before
    pads = [0, 0] * (value.dim() - 1 - dim) + [before, after]
    return aten.constant_pad_nd.default(value, pads, call.change.fill)


class SizeArg:
    """A size argument that depends on outer symbols alone."""

    def __init__(self, expr: Any) -> None:
        self.expr = expr

    def __repr__(self) -> str:
        return f"size({self.expr})"


class OffsetArg:
    """The chunk's first token."""

    def __repr__(self) -> str:
        return "offset"


class LengthArg:
    """The chunk's length in tokens."""

    def __repr__(self) -> str:
        return "length"

"""Run a `BodyPlan` call by call: the reference meaning of a loop body.

The same interpreter serves three uses: on real tensors it is the body, run eagerly; on symbolic
fake tensors under a tracer it yields the graph that Inductor compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from streambp_fx._torch import SizeAnalysis, sympy_interp

from .body import BodyCall, BodyPlan, LengthArg, OffsetArg, Ref, SizeArg
from .placement import FULL, Extent, Streamed
from .rules.arguments import replaced
from .rules.sizes import expr_of, product
from .rules.spec import Chunk

aten = torch.ops.aten
RESHAPED = {aten.view.default, aten._unsafe_view.default}


@dataclass(frozen=True)
class BodySizes:
    """The sizes of one call of a body.

    offset, size
        Where, inside each extent, the chunk begins and how many positions it has.
    symbols
        The outer sizes that the body's shapes depend on, by name.
    """

    offset: dict[Extent, Any]
    size: dict[Extent, Any]
    symbols: dict[str, Any]

    @classmethod
    def of(cls, plan: BodyPlan, inputs: tuple[Any, ...]) -> BodySizes:
        """The sizes among the inputs of a body."""
        extents = plan.extents()
        first = 2 * len(extents) + len(plan.operands) - len(plan.symbols)
        return cls(
            dict(zip(extents, inputs[: 2 * len(extents) : 2], strict=True)),
            dict(zip(extents, inputs[1 : 2 * len(extents) : 2], strict=True)),
            dict(zip(plan.symbols, inputs[first:], strict=True)),
        )

    def evaluate(self, expr: Any) -> Any:
        """An outer size (a number, or a sympy expression over outer symbols) in this call."""
        if isinstance(expr, (int, float)):
            return expr
        if expr.is_number:
            return int(expr)
        symbols = {symbol: self.symbols[str(symbol)] for symbol in expr.free_symbols}
        return sympy_interp(SizeAnalysis, symbols, expr)

    def shape(self, dims: tuple[Any, ...], at: Streamed | None) -> tuple[Any, ...]:
        """``dims`` with the dim that holds the streamed axis replaced by the chunk's."""
        sizes = [
            None if at is not None and dim == at.dim else self.evaluate(size)
            for dim, size in enumerate(dims)
        ]
        if at is not None:
            outer, inner = self.evaluate(expr_of(at.outer)), self.evaluate(expr_of(at.inner))
            sizes[at.dim] = product((outer, self.size[at.extent], inner))
        return tuple(sizes)

    def first(self, extent: Extent) -> Any:
        """The first position, on the whole axis, of this chunk's part of ``extent``."""
        return self.offset[extent] + extent.lo


def run_plan(plan: BodyPlan, *inputs: Any) -> tuple[Any, ...]:
    """Run one chunk.

    Args:
        plan: the body.
        inputs: ``(offset, size)`` of each extent, then the operands.

    Returns:
        The chunks of the concatenated results. Sums are added to their operands in place.
    """
    sizes = BodySizes.of(plan, inputs)
    operands = inputs[2 * len(sizes.offset) :]
    last_use = plan.last_uses()
    results: list[Any] = []

    for index, call in enumerate(plan.calls):
        args = tuple(_resolve(arg, results, operands, sizes) for arg in call.args)
        kwargs = {
            name: _resolve(arg, results, operands, sizes) for name, arg in call.kwargs.items()
        }
        results.append(_run_call(call, sizes, args, kwargs))
        del args, kwargs
        for expired in last_use.get(index, ()):
            results[expired] = None
    return tuple(_resolve(ref, results, operands, sizes) for ref in plan.outputs)


def _resolve(arg: Any, results: list[Any], operands: tuple[Any, ...], sizes: BodySizes) -> Any:
    """An argument with its references filled in.

    Not a closure of `run_plan`: one that calls itself is a reference cycle, which would keep a
    loop's operands alive until the garbage collector runs.
    """
    if isinstance(arg, Ref):
        return results[arg.index] if arg.kind == "call" else operands[arg.index]
    if isinstance(arg, SizeArg):
        return sizes.evaluate(arg.expr)
    if isinstance(arg, OffsetArg):
        return sizes.offset[FULL]
    if isinstance(arg, LengthArg):
        return sizes.size[FULL]
    if isinstance(arg, (tuple, list)):
        return type(arg)(_resolve(item, results, operands, sizes) for item in arg)
    return arg


def _run_call(
    call: BodyCall, sizes: BodySizes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if call.change is not None:
        return _change_extent(call, sizes, args)
    if call.resize is not None and call.letter is not None:
        shapes = [
            None if shape is None else sizes.shape(shape.dims, shape.at) for shape in call.shapes
        ]
        at = next(shape.at for shape in call.shapes if shape is not None and shape.at is not None)
        chunk = Chunk(call.letter, sizes.offset[at.extent], sizes.size[at.extent])
        args, kwargs = replaced(call.target, args, kwargs, call.resize(shapes, chunk))
    target = aten.reshape.default if call.target in RESHAPED else call.target
    return target(*args, **kwargs)


def _change_extent(call: BodyCall, sizes: BodySizes, args: tuple[Any, ...]) -> Any:
    """Slice a chunk to the part inside a narrower extent, or pad it to a wider one."""
    if call.change is None or call.source is None:
        raise ValueError("a change of extent needs its source's position")
    value, dim = args[call.change.source], call.source.dim
    if call.change.fill is None:
        narrow, wide = call.change.extent, call.source.extent
        shift = sizes.first(narrow) - sizes.first(wide) if narrow.lo != wide.lo else 0
        end = shift + sizes.size[narrow]
        # Known of every chunk, and told to the tracer, which else makes a new size of the result.
        # Inductor asks for each of them, and sees not that two follow from the others.
        for index in (shift, end):
            torch._check(index >= 0)
            torch._check(index <= value.shape[dim])
        return aten.slice.Tensor(value, dim, shift, end)
    narrow, wide = call.source.extent, call.change.extent
    before = sizes.first(narrow) - sizes.first(wide) if narrow.lo != wide.lo else 0
    after = sizes.size[wide] - sizes.size[narrow] - before
    parts = [_filled(value, dim, size, call.change.fill) for size in (before, after)]
    return aten.cat.default([parts[0], value, parts[1]], dim)


def _filled(like: Any, dim: int, size: Any, fill: float) -> Any:
    shape = list(like.shape)
    shape[dim] = size
    return aten.full.default(shape, fill, dtype=like.dtype, device=like.device)

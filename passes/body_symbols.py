"""Which symbols of the user's graph the sizes of a loop body depend on."""

from __future__ import annotations

from typing import Any

from .body import BodyPlan, SizeArg
from .placement import Streamed
from .rules.sizes import expr_of


def symbols_of(plan: BodyPlan) -> list[str]:
    """The names of the outer symbols in the body's size arguments and shapes, sorted."""
    names: set[str] = set()
    for call in plan.calls:
        _collect_arguments((call.args, call.kwargs), names)
        for shape in call.shapes:
            if shape is not None:
                _collect_shape(shape.dims, shape.at, names)
        if call.source is not None:
            _collect_shape((), call.source, names)
    for meta in plan.metas:
        _collect_shape((*meta.shape, *(meta.stride or ())), meta.at, names)
    return sorted(names)


def _collect_shape(dims: tuple[Any, ...], at: Streamed | None, names: set[str]) -> None:
    for dim, size in enumerate(dims):
        if not isinstance(size, int) and (at is None or dim != at.dim):
            names.update(str(symbol) for symbol in size.free_symbols)
    if at is not None:
        for factor in (at.outer, at.inner):
            names.update(str(symbol) for symbol in expr_of(factor).free_symbols)


def _collect_arguments(arg: Any, names: set[str]) -> None:
    if isinstance(arg, SizeArg):
        if not isinstance(arg.expr, (int, float)):
            names.update(str(symbol) for symbol in arg.expr.free_symbols)
    elif isinstance(arg, dict):
        for item in arg.values():
            _collect_arguments(item, names)
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            _collect_arguments(item, names)

"""The value of one element of a tensor in a graph, as a function of its index.

Abstract interpretation, backwards from the mask: the element of ``le(a, b)`` at ``(0, 0, q, k)``
is the condition ``a[0, 0, 0, k] <= b[0, 0, q, 0]``; the element of a view is the source's at
another index; the element of ``iota`` is affine in the index. An op without a handler, or whose
handler can not tell, gives an atom named by (node, index): the same element is then equal to
itself, wherever else it is read.

Given   ``le(unsqueeze(iota(T), 0), unsqueeze(iota(T), 1))`` at index ``(q, k)``
Result  the formula ``q - k >= 0``

The graph must be functional: an element has one value.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Graph, Node

from streambp_fx._torch import statically_known_true

from . import mask_arithmetic, mask_logic, mask_runs, mask_views
from .mask_algebra import (
    Atom,
    Linear,
    at_least_zero,
    conditions,
    negation,
    unsatisfiable,
)
from .mask_handlers import Handler, Index, Table
from .mask_runs import Run
from .mask_values import Value, always, truth

_DEEPEST = 64
"""Nodes between the mask and a source, beyond which an element is left unknown (recursion)."""
_MOST_CONDITIONS = 200
"""Conditions in one element's value, beyond which it is left unknown (formulas can double)."""

_HANDLERS: Table = {
    **mask_views.HANDLERS,
    **mask_arithmetic.HANDLERS,
    **mask_logic.HANDLERS,
    **mask_runs.HANDLERS,
}


class Interpreter:
    """Values of elements of one graph's tensors, each computed once."""

    def __init__(self, graph: Graph) -> None:
        self.obstacle = first_mutation(graph)
        self.runs: dict[Atom, Run] = {}
        self._values: dict[tuple[Node, Index], Value] = {}
        self._sizes: dict[Any, Linear] = {}
        self._depth = 0

    def value(self, node: Node, index: Index) -> Value:
        """The element of ``node``'s tensor at ``index``, one `Linear` per dim, within its shape."""
        sizes = self.sizes(node)
        index = tuple(
            Linear.of(0) if size.is_value(1) else i for i, size in zip(index, sizes, strict=True)
        )
        key = (node, index)
        if key not in self._values:
            self._values[key] = self._computed(node, index)
        return self._values[key]

    def _computed(self, node: Node, index: Index) -> Value:
        handler = _handler_of(node.target) if node.op == "call_function" else None
        if handler is None or self._depth >= _DEEPEST:
            return element(node, index)
        self._depth += 1
        try:
            result = handler(self, node, index)
        finally:
            self._depth -= 1
        is_bool = node.meta["val"].dtype == torch.bool
        if result is None or isinstance(result, tuple) == is_bool or _is_large(result):
            return element(node, index)
        return result

    def sizes(self, node: Node) -> tuple[Linear, ...]:
        return tuple(self.size(size) for size in node.meta["val"].shape)

    def size(self, size: int | torch.SymInt | Node) -> Linear:
        """A size, or an integer argument of an op, over the symbols of the shape environment."""
        known = size.meta["val"] if isinstance(size, Node) else size
        if isinstance(known, int):
            return Linear.of(known)
        expression = known.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = _linear_size(expression, known.node.shape_env)
        return self._sizes[expression]

    def broadcast(self, node: Node, out: Node, index: Index) -> Index | None:
        """The index into ``node``'s tensor of the element that ``out`` reads at ``index``."""
        shape, out_shape = node.meta["val"].shape, out.meta["val"].shape
        offset = len(out_shape) - len(shape)
        result = []
        for dim, size in enumerate(shape):
            same = self.size(size) == self.size(out_shape[offset + dim])
            if self.size(size).is_value(1):
                result.append(Linear.of(0))
            elif same or statically_known_true(size == out_shape[offset + dim]):
                result.append(index[offset + dim])
            else:
                return None
        return tuple(result)

    @staticmethod
    def never_negative(expression: Linear) -> bool:
        return unsatisfiable(negation(at_least_zero(expression)))


def _is_large(value: Value) -> bool:
    formulas = [guard for guard, _ in value] if isinstance(value, tuple) else [value]
    found = itertools.chain.from_iterable(conditions(formula) for formula in formulas)
    return next(itertools.islice(found, _MOST_CONDITIONS, None), None) is not None


def element(node: Node, index: Index) -> Value:
    """An element that is not computed further."""
    dtype = node.meta["val"].dtype
    key = ("element", node, index)
    if dtype == torch.bool:
        return truth(Linear.of(Atom(key, low=0, high=Linear.of(1), dtype=dtype)))
    return always(Linear.of(Atom(key, dtype=dtype)))


def first_mutation(graph: Graph) -> Node | None:
    """The first node that writes to a tensor that is not an input, if any.

    AOTAutograd writes mutated inputs back at the end of a graph that is functional otherwise.
    """
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            target = node.args[0] if node.args else None
            if not (isinstance(target, Node) and target.op == "placeholder"):
                return node
    return None


def _handler_of(target: Any) -> Handler | None:
    if target not in _HANDLERS and torch.Tag.pointwise in getattr(target, "tags", ()):
        return mask_logic.unknown_pointwise
    return _HANDLERS.get(target)


def _linear_size(expression: Any, shape_env: Any) -> Linear:
    if expression.is_Integer:
        return Linear.of(int(expression))
    if expression.is_Add:
        return sum((_linear_size(term, shape_env) for term in expression.args), start=Linear.of(0))
    factor, rest = expression.as_coeff_Mul()
    if factor.is_Integer and factor != 1:
        return _linear_size(rest, shape_env) * int(factor)
    return Linear.of(_size_atom(expression, shape_env))


def _size_atom(expression: Any, shape_env: Any) -> Atom:
    bound = shape_env.bound_sympy(expression)
    low, high = (int(end) if end.is_Integer else None for end in (bound.lower, bound.upper))
    return Atom(
        ("size", expression),
        low=low,
        high=Linear.of(high) if high is not None and high < 2**62 else None,
    )

"""Sizes as nodes of a graph that is being built."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .body_builder import RewriteError
from .placement import value_of
from .rules.sizes import expr_of


class SizeNodes:
    """The sizes that ``graph`` knows: those of its inputs, and sums and products of them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes: dict[sympy.Expr, Node] = {}

    def note(self, placeholder: Node) -> None:
        """Remember an input that is a size."""
        value = value_of(placeholder)
        if isinstance(value, torch.SymInt):
            self._nodes.setdefault(value.node.expr, placeholder)

    def symbol(self, name: str) -> Node:
        """The node with the size called ``name``.

        Raises:
            RewriteError: no input carries it.
        """
        for expr, node in self._nodes.items():
            if str(expr) == name:
                return node
        raise RewriteError(f"no input of the graph carries the size {name}")

    def size(self, size: Any) -> Any:
        """``size`` as a number or a node.

        Raises:
            RewriteError: it is not made of sums and products of sizes of inputs.
        """
        return self._node(expr_of(size))

    def _node(self, expr: sympy.Expr) -> Any:
        if expr.is_number:
            return int(expr)
        if expr in self._nodes:
            return self._nodes[expr]
        combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(expr.func)
        if combine is None:
            raise RewriteError(f"the size {expr} is not a sum or product of input sizes")
        total, *parts = (self._node(part) for part in expr.args)
        for part in parts:
            node = self._graph.call_function(combine, (total, part))
            left = value_of(total) if isinstance(total, Node) else total
            right = value_of(part) if isinstance(part, Node) else part
            node.meta["val"] = combine(left, right)
            total = node
        self._nodes[expr] = total
        return total

"""Pass: one value a line scattered into a constant becomes a comparison with positions.

Given:  ``z = full([N, V], 0.0); s = scatter(z, 1, labels[N, 1], -1.0)``
Result: ``s = where(eq(view(iota(V), [1, V]), labels), -1.0, 0.0)``

The backward of cross entropy is such a scatter. That of a gather, such as of a label's
log-probability, is a ``scatter_add`` of ``g[N, 1]`` in place of ``-1.0``. Kernels are fused with a
comparison and not with a scatter, which costs one more buffer of a chunk's logits.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import detect_fake_mode

from .placement import value_of
from .rules.calls import constant_fill
from .rules.sizes import same_size

aten = torch.ops.aten
prims = torch.ops.prims

SCATTERS = (aten.scatter.value, aten.scatter.src, aten.scatter_add.default)
"""Those of a number, of values, and of values that are added."""


def compare_one_hots(graph_module: GraphModule) -> None:
    """Rewrite ``graph_module`` in place. No guard is added."""
    graph = graph_module.graph
    for target in SCATTERS:
        for node in graph.find_nodes(op="call_function", target=target):
            args: tuple[Any, ...] = node.args
            base, dim, index, value = args[:4]
            fill = _fill(base)
            if fill is None or not _is_one_hot(target, fill, base, dim, index, value):
                continue
            with graph.inserting_before(node):
                compared = _Emitter(graph, node).where_hit(dim, index, value, fill)
            node.replace_all_uses_with(compared)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _fill(base: Node) -> Any:
    """The number, or node of a computed one, that ``base`` is filled with; ``None`` if none is."""
    return base.args[1] if base.target is aten.full.default else constant_fill(base)


def _is_one_hot(target: Any, fill: Any, base: Node, dim: int, index: Node, value: Any) -> bool:
    if target is aten.scatter_add.default and (isinstance(fill, Node) or fill):
        return False
    shape = value_of(index).shape
    if _is_tensor(value) and not all(map(same_size, value_of(value).shape, shape)):
        return False  # only a part of the values is scattered
    return _takes_one_each(value_of(base), dim, value_of(index))


def _is_tensor(value: Any) -> bool:
    """Whether ``value`` is a node of a tensor, and not a number or the node of a computed one."""
    return isinstance(value, Node) and isinstance(value_of(value), Tensor)


def _takes_one_each(base: Tensor, dim: int, index: Tensor) -> bool:
    """Whether each line of ``base`` along ``dim`` gets one value, and has a known size."""
    dim %= max(1, base.dim())
    return (
        0 < base.dim() == index.dim()
        and isinstance(base.shape[dim], int)
        and all(
            same_size(size, 1 if other == dim else base.shape[other])
            for other, size in enumerate(index.shape)
        )
    )


class _Emitter:
    """Adds calls that stand for a scatter."""

    def __init__(self, graph: Graph, scatter: Node) -> None:
        self.graph = graph
        self.like: Tensor = value_of(scatter)
        self.stack_trace = scatter.meta.get("stack_trace")

    def where_hit(self, dim: int, index: Node, value: Any, otherwise: Any) -> Node:
        """``value`` where ``index`` points along ``dim``, ``otherwise`` elsewhere.

        ``value`` is a number, or has the shape of ``index``. An index out of range hits nothing.
        """
        like, dim = self.like, dim % self.like.dim()
        count = like.shape[dim]
        line = [count if other == dim else 1 for other in range(like.dim())]
        settings = {"start": 0, "step": 1, "requires_grad": False}
        iota = self._call(prims.iota.default, (count,), [count], torch.int64, **settings)
        places = self.graph.call_function(aten.view.default, (iota, line))
        self._describe(places, line, torch.int64)
        hit = self.graph.call_function(aten.eq.Tensor, (places, index))
        self._describe(hit, like.shape, torch.bool)
        values = [
            each if _is_tensor(each) else self._call(aten.full.default, ([], each), [], like.dtype)
            for each in (value, otherwise)
        ]
        chosen = self.graph.call_function(aten.where.self, (hit, *values))
        self._describe(chosen, like.shape, like.dtype)
        return chosen

    def _call(
        self, target: Any, args: tuple[Any, ...], shape: Any, dtype: torch.dtype, **settings: Any
    ) -> Node:
        """A new tensor, made on the scatter's device."""
        where: dict[str, Any] = {"dtype": dtype, "device": self.like.device}
        node = self.graph.call_function(target, args, {**settings, **where})
        self._describe(node, shape, dtype)
        return node

    def _describe(self, node: Node, shape: Any, dtype: torch.dtype) -> None:
        # Not by calling the op: broadcasting would ask whether a symbolic size is 1.
        with detect_fake_mode([self.like]) or nullcontext():
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=self.like.device)
        node.meta["stack_trace"] = self.stack_trace

"""Pass: give what reads memory by strides the memory that the traced program had.

Given:  ``b = transpose(a, 0, 1)``, where a is contiguous ``[11, 2, 16]``
        ``c = as_strided(b, [2, 11, 16], [176, 16, 1], 0)``
Result: ``a_ = clone(a, memory_format=contiguous)``
        ``c = as_strided(a_, [2, 11, 16], [176, 16, 1], 0)``

Every other op reads values, whatever their layout, so that loops may write their results as they
like. ``as_strided`` reads the memory behind its input: the whole of the value that its input is a
view of. That value is copied to the strides which it had when it was traced. Graph inputs have
theirs.

Raises `RewriteError` where the memory is not that of one dense value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from streambp_fx._torch import storage_id

from .body_builder import RewriteError
from .placement import outermost_first, source_of, value_of
from .rules.sizes import expr_of, product

aten = torch.ops.aten


def pin_layouts(graph_module: GraphModule) -> None:
    """Rewrite ``as_strided`` and ``as_strided_scatter`` in place; nodes need ``meta["val"]``."""
    graph = graph_module.graph
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        given = node.args[0]
        root = _root(given)
        offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
        if offset is None:
            offset = value_of(given).storage_offset()
        with graph.inserting_before(node):
            memory = root if root.op == "placeholder" else _copied(root, node)
        node.args, node.kwargs = (memory, *node.args[1:3], offset), {}
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        if node.all_input_nodes[0].op != "placeholder":
            _write_to_copy(node)
    graph_module.recompile()


def _root(node: Node) -> Node:
    """What ``node`` is a view of, by the storages of the traced values."""
    storage = storage_id(value_of(node))
    while node.op == "call_function":
        before = [one for one in node.all_input_nodes if isinstance(value_of(one), Tensor)]
        shared = [one for one in before if storage_id(value_of(one)) == storage]
        if not shared:
            break
        node = shared[0]
    return node


def _copied(root: Node, reader: Node) -> Node:
    """A copy of ``root`` whose memory is what was traced, outermost dim first."""
    value = value_of(root)
    order = _order(root, reader)
    permuted = root.graph.call_function(aten.permute.default, (root, order))
    permuted.meta = {**reader.meta, "val": value.permute(order)}
    form: dict[str, Any] = {"memory_format": torch.contiguous_format}
    copy = root.graph.call_function(aten.clone.default, (permuted,), form)
    copy.meta = {**reader.meta, "val": aten.clone(permuted.meta["val"], **form)}
    return copy


def _write_to_copy(scatter: Node) -> None:
    """Have ``as_strided_scatter`` write to memory as traced, and read its result like the rest.

    The dims are put back after it, not before: a loop that made the permuted copy would lay it in
    memory as it likes.
    """
    given, graph = scatter.all_input_nodes[0], scatter.graph
    order = _order(given, scatter)
    back = [order.index(dim) for dim in range(len(order))]
    traced = value_of(scatter)
    with graph.inserting_before(scatter):
        scatter.replace_input_with(given, _copied(given, scatter))
    scatter.meta = {**scatter.meta, "val": traced.permute(order).contiguous()}
    with graph.inserting_after(scatter):
        result = graph.call_function(aten.permute.default, (scatter, back))
    result.meta = {**scatter.meta, "val": scatter.meta["val"].permute(back)}
    scatter.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _order(node: Node, reader: Node) -> list[int]:
    """The dims of ``node`` by falling stride.

    Raises:
        RewriteError: its elements are not the whole of its memory, each once.
    """
    value = value_of(node)
    order = outermost_first(value)
    sizes = [value.shape[dim] for dim in order]
    strides = [expr_of(product(sizes[at + 1 :])) for at in range(len(order))]
    wide = [at for at in range(len(order)) if expr_of(sizes[at]) != 1]
    dense = all(expr_of(value.stride(order[at])) == strides[at] for at in wide)
    if not dense or expr_of(value.storage_offset()) != 0:
        raise RewriteError(f"{reader.target} reads memory beyond {node} ({source_of(reader)})")
    return order

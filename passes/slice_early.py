"""Pass: take the rows that a loss reads before the head's product, not after it.

Given::

    logits = linear(hidden, head_weight)        # [B, T, V]
    shifted = logits.float()[:, :-1]            # [B, T - 1, V]

Result::

    rows = hidden[:, :-1]                       # [B, T - 1, d]
    shifted = linear(rows, head_weight).float()

Autograd pads the gradient of a slice with zeros. A chunk of the logits' gradient is then copied,
and held twice; the gradient of ``rows`` is padded in their place, and is narrow.

Out of scope: logits that are read in another way too, and slices of the last dim.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .dynamo_calls import value_of
from .dynamo_emit import Emitter
from .frontier import is_head_product, keeps_rows

ALL = slice(None)


def slice_early(graph_module: GraphModule) -> None:
    """Move slices of a product's rows to its input, in place.

    Args:
        graph_module: a Dynamo graph, with fake values in ``meta["example_value"]``.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        end: Node | None = node
        while end is not None:
            end = _moved(end)
    graph.lint()
    graph_module.recompile()


def _moved(end: Node) -> Node | None:
    """What stands for the slices of ``end``, which are its only readers; ``None`` if they stay."""
    index = _only_slice(end)
    chain = None if index is None else _chain_to_product(end)
    if chain is None or not _may_move(index, chain, list(end.users)):
        return None
    return _move(end, index, chain)


def _only_slice(node: Node) -> Any:
    """The index of every reader of ``node``, if all are equal slices of its rows."""
    value = value_of(node)
    if value is None or not node.users:
        return None
    first = next(iter(node.users)).args[1:]
    if any(one.target is not operator.getitem or one.args != (node, *first) for one in node.users):
        return None
    return first[0] if _slices_rows(first[0], value.ndim) else None


def _slices_rows(index: Any, dims: int) -> bool:
    """Whether ``index`` keeps all dims, in order, and every entry of the last one."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is not Ellipsis and not isinstance(part, slice) for part in parts):
        return False
    reaches_last = Ellipsis in parts[-1:] or (len(parts) == dims or Ellipsis in parts)
    last_is_whole = not reaches_last or parts[-1] in (Ellipsis, ALL)
    return last_is_whole and any(part not in (Ellipsis, ALL) for part in parts)


def _chain_to_product(node: Node) -> list[Node] | None:
    """The product that ``node`` comes from by pointwise ops that nothing else reads, up to it."""
    rows = value_of(node).shape[:-1]
    chain = [node]
    while True:
        current = chain[0]
        source = _source(current)
        if source is None or not keeps_rows(current, rows, {source}):
            return None
        if is_head_product(current, {source}):
            return chain
        if len(source.users) != 1:
            return None
        chain.insert(0, source)


def _source(node: Node) -> Node | None:
    """The one input of ``node`` that has its dims; of a product, whose matrix may, the first."""
    dims = value_of(node).ndim
    inputs = [one for one in node.all_input_nodes if value_of(one) is not None]
    first = node.args[0] if node.args else None
    if isinstance(first, Node) and is_head_product(node, {first}):
        return first
    same = [one for one in inputs if value_of(one).ndim == dims]
    return same[0] if len(same) == 1 else None


def _may_move(index: Any, chain: list[Node], slices: list[Node]) -> bool:
    """Whether ``index`` is known before the product, and gradients are on, or off, up to it."""
    order = {node: position for position, node in enumerate(chain[0].graph.nodes)}
    first, last = order[chain[0]], max(order[node] for node in slices)
    sizes: list[Node] = []
    map_arg(index, sizes.append)
    # A slice where gradients are off stands for a detach, though its example requires one.
    switches = any(
        node.target is torch._C._set_grad_enabled and first < position < last
        for node, position in order.items()
    )
    return not switches and all(order[size] < first for size in sizes)


def _move(end: Node, index: Any, chain: list[Node]) -> Node:
    source = chain[0].args[0]
    emit = Emitter(chain[0])
    new = {source: emit.call(operator.getitem, source, index)}
    for node in chain:
        emit = Emitter(node)
        args, kwargs = map_arg((node.args, node.kwargs), lambda old: new.get(old, old))
        call = emit.method if node.op == "call_method" else emit.call
        new[node] = call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    for user in list(end.users):
        user.replace_all_uses_with(new[end])
        end.graph.erase_node(user)
    for node in reversed(chain):
        node.graph.erase_node(node)
    return new[end]

"""Pass: take the rows that a loss reads before the head's product, not after it.

Given::

    logits = linear(hidden, head_weight)        # [B, T, V]
    shifted = logits.float()[:, :-1]            # [B, T - 1, V]

Result::

    rows = hidden[:, :-1]                       # [B, T - 1, d]
    shifted = linear(rows, head_weight).float()

Autograd pads the gradient of a slice with zeros. A chunk of the logits' gradient is then copied,
and held twice; the gradient of ``rows`` is padded in their place, and is narrower. Rows that no
loss reads, such as those of a prompt, are not multiplied at all.

Left alone: products that are read in another way too or are no wider than what they are made from,
slices of another dim than the last but one, and what is written in place between or afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from streambp_fx._torch import FakeTensor

from .dynamo_calls import example_of, is_call, is_mode_switch, value_of
from .placement import hint_of
from .rowwise import is_product_of, keeps_rows
from .writes import Writes

ALL = slice(None)


def slice_early(graph_module: GraphModule) -> None:
    """Move slices of a product's rows to its input, in place.

    Args:
        graph_module: a Dynamo graph, with fake values in ``meta["example_value"]``.
    """
    moved = False
    writes = Writes(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        end: Node | None = node
        while end is not None:
            end = _moved(end, writes)
            moved = moved or end is not None
    if moved:
        graph_module.graph.lint()
        graph_module.recompile()


def _moved(end: Node, writes: Writes) -> Node | None:
    """What stands for the slices of ``end``, which are its only readers; ``None`` if they stay."""
    index = _only_slice(end)
    chain = None if index is None else _chain_to_product(end)
    if chain is None or not _is_narrower(chain[0]):
        return None
    # Rows that are taken earlier must be those that are taken now.
    if any(writer not in chain for node in chain for writer in writes.writers(node)):
        return None
    order = {node: position for position, node in enumerate(end.graph.nodes)}
    if _mode_changes(chain[0], list(end.users), order):
        return None
    sizes = _sizes_to_hoist(index, chain[0], order)
    if sizes is None:
        return None
    for size in sizes:
        chain[0].prepend(size)
    return _move(end, index, chain)


def _only_slice(node: Node) -> Any:
    """The index of every reader of ``node``, if all take one slice of its rows, and not an empty
    one."""
    value = value_of(node)
    if not isinstance(value, FakeTensor) or value.ndim < 2 or not node.users:
        return None
    first = next(iter(node.users)).args[1:]
    if any(one.target is not operator.getitem or one.args != (node, *first) for one in node.users):
        return None
    taken = value_of(next(iter(node.users)))
    if not isinstance(taken, FakeTensor) or not all(map(hint_of, taken.shape)):
        return None
    return first[0] if _slices_rows(first[0], value.ndim) else None


def _slices_rows(index: Any, dims: int) -> bool:
    """Whether ``index`` is a slice of the last dim but one, and takes all of the others."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is not Ellipsis and not isinstance(part, slice) for part in parts):
        return False
    left = dims - sum(part is not Ellipsis for part in parts)
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = [ALL] * left
    rows = parts.pop(-2)
    return rows != ALL and rows.step in (None, 1) and all(part == ALL for part in parts)


def _chain_to_product(node: Node) -> list[Node] | None:
    """The product that ``node`` comes from by pointwise ops that nothing else reads, up to it."""
    rows = value_of(node).shape[:-1]
    chain = [node]
    while True:
        current = chain[0]
        # Of a pointwise op's inputs, the one that has its dims; a product's is the first.
        first = [one for one in current.args[:1] if isinstance(one, Node)]
        if first and is_product_of(current, set(first)):
            return chain if keeps_rows(current, rows, set(first)) else None
        dims = value_of(current).ndim
        inputs = [one for one in current.all_input_nodes if value_of(one) is not None]
        sources = [one for one in inputs if value_of(one).ndim == dims]
        if len(sources) != 1 or not keeps_rows(current, rows, set(sources)):
            return None
        if len(sources[0].users) != 1 or not isinstance(value_of(sources[0]), FakeTensor):
            return None
        chain.insert(0, sources[0])


def _is_narrower(product: Node) -> bool:
    """Whether the rows that a product reads are shorter than those that it makes."""
    source = value_of(product.args[0])
    known = isinstance(source, FakeTensor)
    return known and hint_of(source.shape[-1]) < hint_of(value_of(product).shape[-1])


def _mode_changes(product: Node, slices: Sequence[Node], order: Mapping[Node, int]) -> bool:
    """Whether gradients are switched between a product and its slices, or inference mode is on.

    A slice where gradients are off stands for a detach, though its example requires one.
    """
    last = max(order[node] for node in slices)
    switches = [node for node in order if is_mode_switch(node) and order[node] < last]
    return any(
        order[node] > order[product] or not is_call(node, "_set_grad_enabled") for node in switches
    )


def _sizes_to_hoist(index: Any, product: Node, order: Mapping[Node, int]) -> list[Node] | None:
    """The sizes in ``index`` that are computed after ``product``, in order; ``None`` if they need
    more than sizes."""
    pending: list[Node] = []
    map_arg(index, pending.append)
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if order[node] < order[product] or node in found:
            continue
        if not isinstance(example_of(node), int | torch.SymInt):
            return None
        found.add(node)
        pending += node.all_input_nodes
    return sorted(found, key=order.__getitem__)


def _move(end: Node, index: Any, chain: Sequence[Node]) -> Node:
    graph, source = end.graph, chain[0].args[0]
    slices = list(end.users)
    with graph.inserting_before(chain[0]):
        rows = graph.call_function(operator.getitem, (source, index))
    rows.meta = {**slices[0].meta, "example_value": _sliced(source, index)}
    new = {source: rows}
    for node in chain:
        example = _sliced(node, index)
        with graph.inserting_before(node):
            new[node] = graph.node_copy(node, lambda old: new.get(old, old))
        new[node].meta["example_value"] = example
    for user in slices:
        user.replace_all_uses_with(new[end])
        graph.erase_node(user)
    for node in reversed(chain):
        graph.erase_node(node)
    return new[end]


def _sliced(node: Any, index: Any) -> Any:
    value = value_of(node)
    with value.fake_mode:
        return value[map_arg(index, example_of)]

"""Pass: compute a residual stream that is written in place out of place.

Given:  h = embed(ids); h += attention(norm(h)); h += mlp(norm2(h)); out = head(h)
Result: h = embed(ids); h1 = h + attention(norm(h)); h2 = h1 + mlp(norm2(h1)); out = head(h2)

Memory that is written in place belongs to one segment, so that such a program could not be cut. A
write becomes a new value where that is the same program: everything that reads the memory later
reads all of it, and is given the new value instead. It is left where a view that was made before is
read after it, where the memory is an input's, or may have been written by calls that are not known,
and where the new value would have another dtype, shape or layout.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from streambp_fx._torch import FakeTensor, enable_python_dispatcher, statically_known_true

from .dynamo_calls import example_of
from .mode_regions import nodes_with_modes
from .writes import Writes, memory_of, share_memory, writes_in_place

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = {f"{name}_": name for name in ("add", "sub", "mul", "div")}


def compute_out_of_place(graph_module: GraphModule) -> None:
    """Replace writes in place by new values where that can be proven right, in place."""
    graph = graph_module.graph
    writes = Writes(graph)
    if not writes:
        return
    order = {node: position for position, node in enumerate(graph.nodes)}
    modes = dict(nodes_with_modes(graph))
    unknown = {
        storage
        for node in graph.nodes
        if not all(map(writes_in_place, writes.writers(node)))
        for storage in memory_of(node)
    }
    values = []
    for node in list(graph.nodes):
        # Elsewhere a new value would have no gradient.
        recorded = modes[node].gradients and not modes[node].inference
        if recorded and _may_be_new(node, unknown, order):
            _make_new(node, order)
            values.append(node)
    if values:
        _run_again(graph, set().union(*map(memory_of, values)), set(values))
        graph_module.recompile()


def _may_be_new(write: Node, unknown: set[int], order: dict[Node, int]) -> bool:
    """Whether a call writes in place, and a new value in its place would be the same program.

    ``unknown`` is memory that calls may write to of which it is not known.
    """
    if _out_of_place(write) is None or len(memory_of(write)) != 1:
        return False
    if memory_of(write) & unknown:
        return False
    stream = write.args[0]
    if not isinstance(stream, Node) or not _like_its_new_value(write, stream):
        return False
    sharing = [node for node in write.graph.nodes if share_memory(node, write)]
    if sharing[0].op in ("placeholder", "get_attr") or not _fills_its_memory(sharing[0]):
        return False
    before = [node for node in sharing if order[node] < order[write]]
    seen_later = [node for node in before if any(order[user] > order[write] for user in node.users)]
    return _written_through(stream).issuperset(seen_later)


def _out_of_place(write: Node) -> Any:
    """What computes what ``write`` writes; ``None`` of other calls."""
    if write.op == "call_method":
        return _METHODS.get(str(write.target))
    return _OPERATORS.get(write.target) if write.op == "call_function" else None


def _like_its_new_value(write: Node, stream: Node) -> bool:
    """Whether computing anew gives what lies in memory as ``stream`` does."""
    value = example_of(stream)
    if not isinstance(value, FakeTensor) or type(example_of(write)) is not type(value):
        return False
    target = _out_of_place(write)
    args, kwargs = map_arg((write.args, write.kwargs), example_of)
    with value.fake_mode, enable_python_dispatcher():
        new = getattr(args[0], target)(*args[1:], **kwargs) if write.op == "call_method" else None
        new = target(*args, **kwargs) if new is None else new
    if not isinstance(new, Tensor) or new.dtype != value.dtype or new.device != value.device:
        return False
    pairs = zip(_geometry(new), _geometry(value), strict=True)
    return new.ndim == value.ndim and all(
        statically_known_true(one == other) for one, other in pairs
    )


def _fills_its_memory(node: Node) -> bool:
    """Whether the value of a node is one tensor, and all of its memory."""
    value = example_of(node)
    if not isinstance(value, FakeTensor):
        return False
    nbytes = value.numel() * value.element_size()
    return statically_known_true(value.storage_offset() == 0) and statically_known_true(
        value.untyped_storage().nbytes() == nbytes
    )


def _written_through(stream: Node) -> set[Node]:
    """``stream``, and what it is the same tensor as: what it was written to through."""
    found = {stream}
    while writes_in_place(stream) and isinstance(stream.args[0], Node):
        stream = stream.args[0]
        found.add(stream)
    return found


def _geometry(value: Tensor) -> tuple[Any, ...]:
    return (*value.shape, *value.stride(), value.storage_offset())


def _make_new(write: Node, order: dict[Node, int]) -> None:
    """Let ``write`` make a new value, which later calls read in place of what it wrote to."""
    for other in list(write.graph.nodes):
        if other is not write and share_memory(other, write) and order[other] < order[write]:
            other.replace_all_uses_with(
                write, delete_user_cb=lambda user: order[user] > order[write]
            )
    write.target = _out_of_place(write)


def _run_again(graph: Graph, affected: set[int], values: set[Node]) -> None:
    """Give what lies in ``affected`` memory examples anew: ``values`` have memory of their own."""
    again: set[Node] = set()
    for node in graph.nodes:
        before = example_of(node)
        if not memory_of(node) & affected:
            continue
        if node in values or not again.intersection(node.all_input_nodes):
            example = _memory_like(before)
        else:
            example = _viewed_again(node)
        node.meta["example_value"] = example
        again.add(node)


def _memory_like(value: FakeTensor) -> Tensor:
    with value.fake_mode, torch.enable_grad():
        like = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        # No leaf, which could not be written in place.
        return like.requires_grad_().clone() if value.requires_grad else like


def _viewed_again(node: Node) -> Any:
    """What a view, or a call that writes in place, gives for the examples of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), example_of)
    target: Any = node.target
    if node.op == "call_method":
        target, args = getattr(args[0], target), args[1:]
    with torch.enable_grad(), enable_python_dispatcher():
        return target(*args, **kwargs)

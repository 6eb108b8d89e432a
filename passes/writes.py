"""Which calls of a Dynamo graph write to memory, and to whose.

Given:  ``scores = q @ k.mT``; ``mask = ...``; ``biased = scores + mask``
        ``view = mask[0]``; ``view.zero_()``
        ``weights = biased.softmax(-1)``
Result: ``Writes(graph).between(mask, biased, weights)`` is ``zero_``

Dynamo's graph is the program as it was written, with calls that change tensors in place; the joint
graph, which AOTAutograd traces, has none. A pass on Dynamo's graph that reads a value at another
moment than the program does must ask here whether it is the same value at both.

Memory is told by the storages of the example values, which views share. A call writes to what its
kind says: methods and functions with a trailing underscore and ``x += y`` to their first argument,
``x[i] = y``, ``out=`` and ``inplace=True`` likewise, ops to what their schema marks, higher-order
ops whose body writes to anything to each of their arguments. Whether calls were missed, such as
functions that are not torch's, is told by the version counters of the examples, on which Dynamo ran
the graph: memory that changed more often than there are calls known to change it may have been
changed by any call that touches it.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from streambp_fx._torch import HigherOrderOperator, pytree, storage_id

from .dynamo_calls import bodies_of, example_of, is_flex_attention, is_torch_function

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift", "concat"),
    )
)


class Writes:
    """The writes of one graph, as it is when this is made.

    The graph may change later as long as nodes that are added write nothing, and have the example
    values of those that they replace.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {node: position for position, node in enumerate(graph.nodes)}
        known = {node: _written_memory(node) for node in graph.nodes}
        known = {node: memory for node, memory in known.items() if memory}
        counts = Counter(storage for memory in known.values() for storage in memory)
        opaque = {
            storage for storage, version in _versions(graph).items() if version > counts[storage]
        }
        if opaque:
            for node in graph.nodes:
                touched = memory_of(node).union(*map(memory_of, node.all_input_nodes)) & opaque
                if touched and node.op not in ("placeholder", "get_attr", "output"):
                    known[node] = known.get(node, frozenset()) | touched
        self._written = dict(sorted(known.items(), key=lambda item: self._order[item[0]]))

    def __bool__(self) -> bool:
        """Whether anything is written at all."""
        return bool(self._written)

    def writers(self, node: Node) -> list[Node]:
        """The calls that may write to the memory of ``node``'s value, in order."""
        memory = memory_of(node)
        return [one for one, written in self._written.items() if written & memory]

    def between(self, node: Node, first: Node, last: Node) -> Node | None:
        """A call after ``first`` and before ``last`` that may write to ``node``'s memory.

        ``None`` if ``node`` has the same value when ``first`` and when ``last`` run.
        """
        # Nodes that were added meanwhile have no place: then any call may be between.
        start, stop = self._order.get(first, -1), self._order.get(last, len(self._order))
        return next((one for one in self.writers(node) if start < self._order[one] < stop), None)


def writes_in_place(node: Node) -> bool:
    """Whether a call by itself writes, or may write, to its arguments."""
    return bool(_written_memory(node))


def share_memory(one: Node, other: Node) -> bool:
    """Whether the values of two nodes may lie in the same memory."""
    return bool(memory_of(one) & memory_of(other))


def memory_of(node: Node) -> frozenset[int]:
    """The storages of the tensors in the example value of ``node``."""
    return frozenset(map(storage_id, _tensors(node)))


def _tensors(node: Node) -> list[Tensor]:
    leaves = pytree.tree_leaves(example_of(node))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and _has_storage(leaf)]


def _has_storage(tensor: Tensor) -> bool:
    try:
        storage_id(tensor)
    except (NotImplementedError, RuntimeError):  # subclasses and functorch's wrappers
        return False
    return True


def _versions(graph: Graph) -> dict[int, int]:
    """Storage -> how often Dynamo saw it change."""
    versions: dict[int, int] = {}
    for node in graph.nodes:
        for tensor in _tensors(node):
            storage = storage_id(tensor)
            versions[storage] = max(versions.get(storage, 0), tensor._version)
    return versions


def _written_memory(node: Node) -> frozenset[int]:
    """The memory that a call is known to write, or may write if nothing is known of it."""
    written: list[Any] = []
    if node.op == "call_method":
        name = str(node.target)
        if name == "__setitem__" or _is_in_place_name(name):
            written = [node.args[0]]
    elif node.op == "call_function":
        written = _written_arguments(node)
    elif node.op == "call_module":
        written = [*node.all_input_nodes]
    leaves = pytree.tree_leaves(written)
    return frozenset().union(*(memory_of(leaf) for leaf in leaves if isinstance(leaf, Node)))


def _is_in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _written_arguments(node: Node) -> list[Any]:
    target: Any = node.target
    if target in _IN_PLACE_OPERATORS or target is operator.setitem:
        return [node.args[0]]
    if isinstance(target, HigherOrderOperator):
        return [] if _is_pure_higher_order(node) else [node.args, node.kwargs]
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _by_schema(node, target)
    if not is_torch_function(target):  # versions tell what it writes
        return []
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return []  # ``and_`` and ``or_``, which write nothing
    written = [node.kwargs.get("out")]
    if _is_in_place_name(getattr(target, "__name__", "")):
        written += [node.args[:1], node.kwargs.get("input")]
    arguments = _bound(node)
    if arguments.get("inplace"):
        written.append(arguments.get("input"))
    if arguments.get("max_norm") is not None:  # embedding rescales rows of its weight
        written.append(arguments.get("weight"))
    written += [arguments.get("running_mean"), arguments.get("running_var")]
    return written


def _by_schema(node: Node, target: Any) -> list[Any]:
    """What the schema marks as written; for a packet, everything if any overload writes."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = (getattr(target, name) for name in target.overloads())
        mutates = any(overload._schema.is_mutable for overload in overloads)
        return [node.args, node.kwargs] if mutates else []
    written = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            in_args = position < len(node.args) and not argument.kwarg_only
            written.append(node.args[position] if in_args else node.kwargs.get(argument.name))
    return written


def _bound(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, where the function's parameters are known."""
    signature = _signature(node.target)
    if signature is None:
        return dict(node.kwargs)
    try:
        return dict(signature.bind(*node.args, **node.kwargs).arguments)
    except TypeError:
        return dict(node.kwargs)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    # Of built-in functions, torch keeps stand-ins with their parameters.
    stand_in = torch.overrides.get_testing_overrides().get(function, function)
    try:
        return inspect.signature(stand_in)
    except (TypeError, ValueError):
        return None


def _is_pure_higher_order(node: Node) -> bool:
    """Whether a higher-order op has bodies, and none of them writes to anything."""
    if is_flex_attention(node):
        return True
    graphs = [body.graph for body in bodies_of(node)]
    return bool(graphs) and not any(Writes(graph) for graph in graphs)

"""Reading calls on the Dynamo graph, where one op has many names.

``torch.matmul(a, b)``, ``a.matmul(b)``, ``a @ b`` and ``operator.matmul`` are the same call; so are
``torch.nn.functional.softmax``, ``torch.softmax`` and the method. What is called is therefore
compared by name, and only for functions of torch and of `operator`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeGuard

from torch import Tensor
from torch.fx import Node

_MODULES = ("torch", "_operator", "operator")
_VIEWS_AND_CASTS = (
    *("expand", "broadcast_to", "reshape", "view", "flatten", "unsqueeze", "getitem", "repeat"),
    *("repeat_interleave", "transpose", "swapaxes", "permute", "contiguous", "clone"),
    *("to", "float", "half", "bfloat16", "double", "type", "type_as"),
)


def name_of(node: Any) -> str | None:
    """The name of the function of torch or method that ``node`` calls, without in-place marks."""
    if not isinstance(node, Node):
        return None
    if node.op == "call_method":
        return str(node.target).rstrip("_")
    if node.op != "call_function":
        return None
    module = getattr(node.target, "__module__", None) or ""
    # Functions implemented in C++ have no module, or an object as __self__ that is torch's.
    if module and module.split(".")[0] not in _MODULES:
        return None
    return getattr(node.target, "__name__", "").rstrip("_")


def is_call(node: Any, *names: str) -> TypeGuard[Node]:
    """Whether ``node`` calls a function or method with one of these names."""
    return name_of(node) in names


def argument_of(node: Node, position: int, name: str, default: Any = None) -> Any:
    """The argument at ``position`` (the tensor itself is 0, for methods too) or called ``name``."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def value_of(node: Any) -> Any:
    """The example tensor of a node, ``None`` where it is no tensor or Dynamo recorded none."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def erase_unused(nodes: Iterable[Any]) -> None:
    """Erase calls without users, in this order, and then what only they used.

    Give it nodes whose calls change nothing in place; the walk goes on through views and casts
    alone.
    """
    pending = deque(node for node in nodes if isinstance(node, Node))
    erased: set[Node] = set()
    while pending:
        node = pending.popleft()
        if node in erased or node.users or node.op not in ("call_function", "call_method"):
            continue
        erased.add(node)
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        pending.extend(one for one in inputs if is_call(one, *_VIEWS_AND_CASTS))

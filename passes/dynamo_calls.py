"""Reading calls on the Dynamo graph, where one op has many names.

``torch.matmul(a, b)``, ``a.matmul(b)``, ``a @ b`` and ``operator.matmul`` are the same call; so are
``torch.nn.functional.softmax``, ``torch.softmax`` and the method. What is called is therefore
compared by name, and only for functions that torch, ``torch.nn.functional`` and `operator` hold
under that name: ``torch.masked.softmax`` is another function.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

_NAMESPACES: tuple[Any, ...] = (
    *(torch, torch.Tensor, torch.nn.functional, operator),
    *(torch._C, torch._C._nn, torch.amp.autocast_mode),
)
_MODULES = ("torch", "_operator", "operator")
_MODE_SWITCHES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")
_DERIVATIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")
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
        return _plain(str(node.target))
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "")
    held = any(getattr(space, name, None) is node.target for space in _NAMESPACES)
    return _plain(name) if held else None


def _plain(name: str) -> str:
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_torch_function(target: Any) -> bool:
    """Whether ``target`` is a function of torch or of `operator`, not of another package."""
    module = getattr(target, "__module__", None) or ""
    # Functions implemented in C++ have no module, or an object as __self__ that is torch's.
    return not module or module.split(".")[0] in _MODULES


def is_mode_switch(node: Node) -> bool:
    """Whether the node changes whether what follows has a gradient."""
    return getattr(node.target, "__name__", "") in _MODE_SWITCHES


def is_derivative(node: Node) -> bool:
    """Whether the node starts a derivative that the program takes itself, by `torch.func`."""
    return getattr(node.target, "__name__", "") in _DERIVATIVES


def is_flex_attention(node: Node) -> bool:
    """Whether the node is flex attention, whose subgraphs are score and mask functions."""
    return getattr(node.target, "__name__", "").startswith("flex_attention")


def is_call(node: Any, *names: str) -> TypeGuard[Node]:
    """Whether ``node`` calls a function or method with one of these names."""
    return name_of(node) in names


def argument_of(node: Node, position: int, name: str, default: Any = None) -> Any:
    """The argument at ``position`` (the tensor itself is 0, for methods too) or called ``name``."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def arguments_of(node: Node, *names: str) -> tuple[Any, ...] | None:
    """The arguments of a call whose parameters are ``names``, in order, ``None`` for absent ones.

    ``None`` if the call has others as well, of which a reader would know nothing.
    """
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return tuple(argument_of(node, position, name) for position, name in enumerate(names))


def bodies_of(node: Node) -> list[GraphModule]:
    """The subgraphs that a higher-order op is given."""
    owner = node.graph.owning_module
    held = [
        getattr(owner, str(argument.target), None)
        for argument in node.all_input_nodes
        if argument.op == "get_attr"
    ]
    return [one for one in held if isinstance(one, GraphModule)]


def times_read(node: Node) -> int:
    """How often ``node`` stands among the arguments of other nodes."""
    reads: list[Node] = []
    for user in node.users:
        map_arg((user.args, user.kwargs), reads.append)
    return reads.count(node)


def example_of(node: Node) -> Any:
    """The fake value of a node of a Dynamo graph."""
    return node.meta.get("example_value")


def value_of(node: Any) -> Any:
    """The example tensor of a node, ``None`` where it is no tensor or Dynamo recorded none."""
    value = example_of(node) if isinstance(node, Node) else None
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

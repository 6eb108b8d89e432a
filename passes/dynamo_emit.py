"""Inserting nodes into the Dynamo graph, with what later passes read of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from streambp_fx._torch import FakeTensor

_PROVENANCE = ("stack_trace", "source_fn_stack", "nn_module_stack")


class Emitter:
    """Inserts nodes before ``before``, each with its example value and the same provenance."""

    def __init__(self, before: Node) -> None:
        self.before = before
        self._emitted: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of the function ``target``."""
        graph = self.before.graph
        with graph.inserting_before(self.before):
            node = graph.call_function(target, args, kwargs)
        return self._describe(node, target)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of the method ``name`` of ``args[0]``."""
        graph = self.before.graph
        with graph.inserting_before(self.before):
            node = graph.call_method(name, args, kwargs)
        return self._describe(node, lambda tensor, *rest, **kw: getattr(tensor, name)(*rest, **kw))

    def undo(self) -> None:
        """Erase what was inserted; nothing may use it."""
        while self._emitted:
            node = self._emitted.pop()
            node.graph.erase_node(node)

    def _describe(self, node: Node, function: Callable[..., Any]) -> Node:
        self._emitted.append(node)
        meta = self.before.meta
        node.meta.update({key: meta[key] for key in _PROVENANCE if key in meta})
        args = map_arg(node.args, lambda argument: argument.meta["example_value"])
        kwargs = map_arg(node.kwargs, lambda argument: argument.meta["example_value"])
        # The mode of the examples: that of the tracing context is another one by now. No gradient:
        # to autograd, the whole program has run on them, and its later writes forbid some calls.
        example = meta.get("example_value")
        mode = example.fake_mode if isinstance(example, FakeTensor) else nullcontext()
        with mode, torch.no_grad():
            node.meta["example_value"] = function(*args, **kwargs)
        return node

"""Analysis: logits that leave a Dynamo graph whole, with a gradient, for lack of the loss in it.

Given:  ``logits = linear(hidden, head_weight); return logits``, as before a graph break
Result: a `Barrier` at ``linear``, with the bytes of ``logits`` and the reason for the break

The gradient of such an output comes from outside of the graph, for all of it at once: neither it
nor the output can be computed by chunk.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from .barrier import Barrier
from .dynamo_calls import value_of
from .placement import hint_of, source_of
from .rules.sizes import product

MOST_DIMS = 3
"""``[batch, tokens, vocabulary]``; keys and values, which a model returns as well, have four."""

_KEEP_IN_ONE = (
    "torch._dynamo.config.ignore_logging_functions, or reorderable_logging_functions, keeps a "
    "graph whole where what breaks it is a call that logs"
)


def whole_outputs(graph_module: GraphModule) -> list[Barrier]:
    """One barrier for each large output that a graph without a loss returns."""
    outputs = dict.fromkeys(graph_module.graph.output_node().all_input_nodes)
    values = {node: value_of(node) for node in outputs}
    if any(
        _has_gradient(value) and hint_of(product(value.shape)) == 1 for value in values.values()
    ):
        return []
    found = []
    for node, value in values.items():
        source = _widening_product(node) if _has_gradient(value) else None
        if source is not None and value.ndim <= MOST_DIMS:
            size = hint_of(product(value.shape)) * value.element_size()
            name = getattr(source.target, "__name__", str(source.target))
            found.append(Barrier(name, source_of(source), _reason(graph_module), size))
    return found


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _widening_product(node: Node) -> Node | None:
    """The product with a matrix that made the value of ``node`` wider than what it was made of.

    Between them are calls that keep the number of elements: casts, views, scales.
    """
    while True:
        value = value_of(node)
        if not isinstance(value, Tensor) or value.ndim < 2 or node.op == "placeholder":
            return None
        width, count = hint_of(value.shape[-1]), hint_of(product(value.shape))
        inputs = [one for one in node.all_input_nodes if isinstance(value_of(one), Tensor)]
        shapes = [tuple(map(hint_of, value_of(one).shape)) for one in inputs]
        for shape in shapes:
            narrow = shape[-1] if shape else width
            rows_agree = narrow < width and count // width * narrow == math.prod(shape)
            if rows_agree and any(sorted(other) == [narrow, width] for other in shapes):
                return node
        same = [n for n, shape in zip(inputs, shapes, strict=True) if math.prod(shape) == count]
        if not same:
            return None
        node = same[0]


def _reason(graph_module: GraphModule) -> str:
    whole = "its result leaves the graph whole, with a gradient, before the loss"
    broken = getattr(graph_module, "compile_subgraph_reason", None)
    if broken is None or not broken.graph_break:
        return f"{whole}: compile the loss together with the model"
    where = "".join(
        f' at File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'
        for frame in broken.user_stack[-1:]
    )
    why, *_ = broken.reason.splitlines() or [""]
    return f"{whole}: the graph breaks{where} ({why}); {_KEEP_IN_ONE}"

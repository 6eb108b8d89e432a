"""Finding ``sdpa_kernel``, which chooses between kernels that are not called any more.

Given:  ``with sdpa_kernel(SDPBackend.MATH): o = scaled_dot_product_attention(q, k, v)``
Result: ``["sdpa_kernel([MATH]) is not honoured: attention runs as streambp::attention (...)"]``

Dynamo writes the context into the graph where it is entered in the traced program; one that is
around the call is found by the switches it sets.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .dynamo_calls import is_call
from .placement import source_of

_SWITCHES = {
    "FLASH_ATTENTION": torch.backends.cuda.flash_sdp_enabled,
    "EFFICIENT_ATTENTION": torch.backends.cuda.mem_efficient_sdp_enabled,
    "MATH": torch.backends.cuda.math_sdp_enabled,
    "CUDNN_ATTENTION": torch.backends.cuda.cudnn_sdp_enabled,
}


def kernel_choices(graph_module: GraphModule) -> list[str]:
    """One line for each choice of kernels around or within a graph that calls SDPA."""
    graphs = (module.graph for module in graph_module.modules() if isinstance(module, GraphModule))
    nodes = [node for graph in graphs for node in graph.nodes]
    if not any(is_call(node, "scaled_dot_product_attention") for node in nodes):
        return []
    lines = []
    enabled = [name for name, is_enabled in _SWITCHES.items() if is_enabled()]
    if len(enabled) < len(_SWITCHES):
        lines.append(_line(enabled, "around the compiled function"))
    for node in nodes:
        chosen = _chosen(node)
        if chosen and not set(_SWITCHES) <= set(chosen):
            lines.append(_line(chosen, source_of(_first_with_source(node))))
    return lines


def _chosen(node: Node) -> list[str]:
    """The names of the kernels that ``node`` allows; leaving the context allows them all again."""
    if getattr(node.target, "__name__", "") != "_sdpa_kernel" or not node.args:
        return []
    return [str(choice.args[0]) for choice in node.all_input_nodes if choice.args]


def _first_with_source(node: Node) -> Node:
    """``node``, or the first after it with a source: Dynamo records none for contexts."""
    while node.op != "output" and "stack_trace" not in node.meta:
        node = node.next
    return node


def _line(names: list[str], where: str) -> str:
    return (
        f"sdpa_kernel([{', '.join(names)}]) is not honoured: attention runs as "
        f"streambp::attention ({where})"
    )

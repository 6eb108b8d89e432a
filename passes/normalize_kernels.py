"""Pass: replace attention kernels that are already in the joint graph by our op.

`normalize_attention` sees the calls that a model writes. ``F.multi_head_attention_forward`` hides
its call, which reaches the joint graph as the kernel that torch chose and that kernel's backward.

Given:  ``out, lse = _scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)``
Result: ``out, lse = streambp::attention(q, k, v, None, None, True, scale, 0.0)``

and the kernel's backward accordingly. Only the CPU kernel keeps no state of its own (CUDA's keep
random offsets and padded lengths); the others stay, and are barriers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from streambp_fx import ops as ops  # registers streambp::attention

from .placement import value_of
from .rules.sizes import same_size

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def normalize_kernels(graph_module: GraphModule) -> None:
    """Replace the CPU attention kernel and its backward, in place."""
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target not in (KERNEL, KERNEL_BACKWARD):
            continue
        given = _arguments(node)
        if given["dropout_p"] != 0.0 or not _square_if_causal(given):
            continue
        scale = given["scale"]
        if scale is None:
            scale = 1.0 / math.sqrt(value_of(given["query"]).shape[-1])
        how = (given["is_causal"], scale, 0.0)
        heads = (given["query"], given["key"], given["value"], given["attn_mask"], None)
        target = torch.ops.streambp.attention.default
        args: tuple[Any, ...] = (*heads, *how)
        if node.target is KERNEL_BACKWARD:
            target = torch.ops.streambp.attention_backward.default
            args = (given["grad_out"], *heads, given["out"], given["logsumexp"], *how)
        with graph_module.graph.inserting_before(node):
            new = graph_module.graph.call_function(target, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph_module.graph.erase_node(node)


def _arguments(node: Node) -> dict[str, Any]:
    """Every argument of the call by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip((argument.name for argument in schema), node.args, strict=False))
    return {**given, **node.kwargs}


def _square_if_causal(given: dict[str, Any]) -> bool:
    """Our op is causal over as many keys as queries alone."""
    rows, keys = value_of(given["query"]).shape[2], value_of(given["key"]).shape[2]
    return not given["is_causal"] or same_size(rows, keys)

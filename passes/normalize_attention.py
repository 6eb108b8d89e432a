"""Pass: every attention on the Dynamo graph becomes ``streambp::attention``.

Given:  ``k = k[:, :, None].expand(B, 2, 4, T, E).reshape(B, 8, T, E)``, the same for ``v``
        ``o = scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)``
Result: ``seed = torch.randint(0, 2**62, (), dtype=torch.int64)``
        ``o = streambp.attention(q, k, v, mask, seed, False, E**-0.5, 0.1)[0]``, with k and v of 2
        heads

1. Calls of SDPA, in every form it takes.
2. Attention that is written out (`recognize_attention`).
3. The same in the bodies of higher-order ops (checkpointed layers); flex attention, which is a
   higher-order op itself, is left alone.

What does not become the op stays as it is and is returned as a `Refusal`. ``sdpa_kernel`` chooses
no kernel any more (see `kernel_choice`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from .attention_call import (
    AttentionCall,
    CannotNormalizeError,
    Refusal,
    emit_attention,
    refusal_of,
    tensor_of,
)
from .attention_layout import taking_the_place_of
from .autocast_regions import AutocastState, nodes_with_autocast
from .dynamo_calls import argument_of, erase_unused, is_call, is_flex_attention
from .dynamo_emit import Emitter
from .recognize_attention import recognize_attention
from .writes import Writes


def normalize_attention(graph_module: GraphModule) -> list[Refusal]:
    """Rewrite ``graph_module`` in place; returns what is left as it was, and why.

    The nodes need ``meta["example_value"]``, as Dynamo records it. No guard is added.
    """
    return _normalize(graph_module, AutocastState())


def _normalize(graph_module: GraphModule, around: AutocastState) -> list[Refusal]:
    refusals: list[Refusal] = []
    writes = Writes(graph_module.graph)
    for node, autocast in list(nodes_with_autocast(graph_module.graph, around)):
        if is_call(node, "scaled_dot_product_attention"):
            try:
                _replace_sdpa(node, autocast, writes)
            except CannotNormalizeError as error:
                refusals.append(refusal_of(node, str(error)))
        for body in _bodies(graph_module, node):
            refusals += _normalize(body, autocast)
    refusals += recognize_attention(graph_module, writes)
    graph_module.recompile()
    return refusals


def _bodies(graph_module: GraphModule, node: Node) -> Iterator[GraphModule]:
    """The subgraphs that a higher-order op is called with."""
    if node.op != "call_function" or is_flex_attention(node):
        return
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            body = getattr(graph_module, str(argument.target), None)
            if isinstance(body, GraphModule):
                yield body


def _replace_sdpa(node: Node, autocast: AutocastState, writes: Writes) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    defaults = (None, None, None, None, 0.0, False, None, False)
    query, key, value, mask, dropout_p, causal, scale, grouped = (
        argument_of(node, position, name, default)
        for position, (name, default) in enumerate(zip(names, defaults, strict=True))
    )
    for name, argument, kinds in [
        ("dropout_p", dropout_p, (int, float)),
        ("is_causal", causal, (bool,)),
        ("scale", scale, (int, float, type(None))),
        ("enable_gqa", grouped, (bool,)),
    ]:
        if not isinstance(argument, kinds):
            raise CannotNormalizeError(f"{name} is not a constant")
    if mask is not None and not isinstance(mask, Node):
        raise CannotNormalizeError("attn_mask is not a tensor")
    if causal and mask is not None:
        raise CannotNormalizeError("attn_mask and is_causal exclude each other")
    cast_to = autocast.dtype_for(tensor_of(query).device.type)
    dtype = cast_to or tensor_of(query).dtype
    if dtype == torch.float64 or tensor_of(query).dtype == torch.float64:
        dtype, cast_to = torch.float64, None  # autocast leaves float64 alone
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        bias=mask,
        causal=causal,
        scale=None if scale is None else float(scale),
        dropout_p=float(dropout_p),
        dtype=dtype,
        bias_dtype=cast_to,
        out_dtype=dtype,
        grouped=grouped,
    )
    emit = Emitter(node)
    attention = emit_attention(emit, call, writes)
    attention = taking_the_place_of(emit, attention, node, writes)
    node.replace_all_uses_with(attention)
    erase_unused([node, key, value])

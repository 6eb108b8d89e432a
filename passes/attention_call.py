"""An attention found on the Dynamo graph, and its replacement by ``streambp::attention``.

Shared by the two passes that find one: `normalize_attention` (calls of SDPA) and
`recognize_attention` (attention written out as matrix products and a softmax).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

import streambp_fx.ops.attention  # noqa: F401  (defines the op)
from streambp_fx._torch import FakeTensor

from .attention_heads import Ungrouped, before_repeat
from .dynamo_calls import is_call, value_of
from .dynamo_emit import Emitter
from .placement import source_of
from .rules.sizes import same_size
from .rules.spec import Size
from .writes import Writes


@dataclass(frozen=True)
class Refusal:
    """An attention that stays as it is: which op, where in the user's program, and why."""

    op: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.reason} ({self.source})"


class CannotNormalizeError(Exception):
    """Says why an attention can not become the op; the passes catch it and report it."""


@dataclass(frozen=True)
class AttentionCall:
    """The operands of one attention, of ranks 2 to 4, ``[..., L, E]`` as in SDPA.

    dtype: what query, key and value are cast to: autocast does that for SDPA and not for custom
    ops. bias_dtype: the same for an additive bias, ``None`` to leave it. out_dtype: of the result.
    grouped: query heads may be a multiple of key heads. blind_rows_are_nan: a row without an
    allowed key is nan, as a softmax makes it, and not 0.
    """

    query: Node
    key: Node
    value: Node
    bias: Node | None
    causal: bool
    scale: float | None
    dropout_p: float
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    out_dtype: torch.dtype
    grouped: bool
    blind_rows_are_nan: bool = False


def refusal_of(node: Node, reason: str) -> Refusal:
    """The refusal of the attention that ``node`` computes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    return Refusal(name, source_of(node), reason)


def tensor_of(node: Node) -> Tensor:
    """The example tensor of a node.

    Raises:
        CannotNormalizeError: the node is no tensor, or Dynamo recorded no example.
    """
    value = value_of(node)
    if not isinstance(value, FakeTensor):  # wrappers of vmap and others change what ops mean
        raise CannotNormalizeError(f"the shape of {node} is unknown")
    return value


def check_bias(bias: Node, writes: Writes) -> None:
    """
    Raises:
        CannotNormalizeError: the bias needs a gradient, which the op does not compute.
    """
    # What is detached in place needed one before.
    if tensor_of(bias).requires_grad or any(is_call(w, "detach") for w in writes.writers(bias)):
        raise CannotNormalizeError(f"the bias {bias} needs a gradient")


def emit_attention(emit: Emitter, call: AttentionCall, writes: Writes) -> Node:
    """The node that holds the attention's result, in the rank and dtype of the program's.

    ``writes`` are those of the graph: the operands must be unchanged where ``emit`` inserts.

    Raises:
        CannotNormalizeError: shapes that the op does not take. No node is added then.
    """
    if call.bias is not None:
        check_bias(call.bias, writes)
    key, value = _ungrouped(call, emit.before, writes)
    rank = _check_shapes(call, _heads_of(call.key, key), _heads_of(call.value, value))
    scale = _scale(call)
    query, scale = _with_positive_scale(emit, call.query, scale)
    operands = [
        _operand(emit, _kept(emit, node, writes), call.dtype, rank)
        for node in (query, _source(emit, call.key, key), _source(emit, call.value, value))
    ]
    seed = None
    if call.dropout_p > 0.0:
        device = tensor_of(call.query).device
        seed = emit.call(torch.randint, 0, 2**62, (), dtype=torch.int64, device=device)
    attention = emit.call(
        torch.ops.streambp.attention.default,
        *operands,
        _bias(emit, call, rank, writes),
        seed,
        call.causal,
        scale,
        call.dropout_p,
    )
    out = emit.call(operator.getitem, attention, 0)
    if call.blind_rows_are_nan:
        out = _nan_in_blind_rows(emit, out, emit.call(operator.getitem, attention, 1))
    for _ in range(4 - rank):
        out = emit.method("squeeze", out, rank - 2)
    return out if call.out_dtype == call.dtype else emit.method("to", out, call.out_dtype)


def _nan_in_blind_rows(emit: Emitter, out: Node, logsumexp: Node) -> Node:
    """``out * nan`` where the log-sum-exp is that of no key: gradients become nan there as well."""
    device, dtype = tensor_of(out).device, tensor_of(out).dtype
    nan, one = (
        emit.call(torch.full, (), factor, device=device, dtype=dtype) for factor in (math.nan, 1.0)
    )
    blind = emit.call(operator.eq, logsumexp, -math.inf)
    factors = emit.call(torch.where, blind, nan, one)
    return emit.call(operator.mul, out, emit.method("unsqueeze", factors, -1))


def _ungrouped(
    call: AttentionCall, at: Node, writes: Writes
) -> tuple[Ungrouped | None, Ungrouped | None]:
    """K and V before they were repeated, if both were, from the same number of heads."""
    key, value = (before_repeat(node, at, writes) for node in (call.key, call.value))
    if key is None or value is None:
        return None, None
    heads = [tensor_of(one.source).shape[one.head_dim] for one in (key, value)]
    return (key, value) if same_size(*heads) else (None, None)


def _heads_of(node: Node, ungrouped: Ungrouped | None) -> Size:
    if ungrouped is not None:
        return tensor_of(ungrouped.source).shape[ungrouped.head_dim]
    shape = tensor_of(node).shape
    return shape[1] if len(shape) == 4 else 1


def _check_shapes(call: AttentionCall, key_heads: Size, value_heads: Size) -> int:
    shapes = [tuple(tensor_of(node).shape) for node in (call.query, call.key, call.value)]
    query, key, value = shapes
    rank = len(query)
    if not 2 <= rank <= 4 or len(key) != rank or len(value) != rank:
        raise CannotNormalizeError(f"ranks other than 2, 3 and 4: {shapes}")
    if rank > 2 and not _all_same([shape[0] for shape in shapes]):
        raise CannotNormalizeError(f"the batch broadcasts: {shapes}")
    if not same_size(key_heads, value_heads):
        raise CannotNormalizeError(f"key and value have different numbers of heads: {shapes}")
    query_heads = query[1] if rank == 4 else 1
    # One head that broadcasts is one group; any other number must be meant as groups.
    repeats = not same_size(_heads_of(call.key, None), key_heads)
    if not (
        same_size(query_heads, key_heads) or same_size(key_heads, 1) or repeats or call.grouped
    ):
        raise CannotNormalizeError(f"the heads broadcast: {shapes}")
    if call.causal and not same_size(query[-2], key[-2]):
        raise CannotNormalizeError(
            "is_causal aligns to the upper left where the numbers of queries and keys differ, "
            f"and {query[-2]} and {key[-2]} are not known to be equal"
        )
    if call.bias is not None and tensor_of(call.bias).dim() > rank:
        raise CannotNormalizeError(f"the bias has more dims than the query: {shapes}")
    return rank


def _all_same(sizes: Sequence[Size]) -> bool:
    return all(same_size(size, sizes[0]) for size in sizes)


def _scale(call: AttentionCall) -> float:
    if call.scale is not None:
        if not math.isfinite(call.scale):
            raise CannotNormalizeError(f"the scale is {call.scale}")
        return call.scale
    size = tensor_of(call.query).shape[-1]
    if not isinstance(size, int):
        raise CannotNormalizeError("the head size, which sets the scale, is not a constant")
    return 1.0 / math.sqrt(size)


def _with_positive_scale(emit: Emitter, query: Node, scale: float) -> tuple[Node, float]:
    """Kernels scale what is masked too: ``-inf`` times a number that is not positive is no mask."""
    if scale > 0.0:
        return query, scale
    sign, size = (0.0, 1.0) if scale == 0.0 else (-1.0, -scale)
    return emit.call(operator.mul, query, sign), size


def _source(emit: Emitter, node: Node, ungrouped: Ungrouped | None) -> Node:
    if ungrouped is None:
        return node
    if ungrouped.head_dim == 1:
        return ungrouped.source
    return emit.method("transpose", ungrouped.source, 1, 2)


def _kept(emit: Emitter, node: Node, writes: Writes) -> Node:
    """``node``, copied if it is written later: the op saves what it reads for its backward."""
    at = emit.before
    later = any(writes.between(node, at, end) for end in at.graph.find_nodes(op="output"))
    return emit.method("clone", node) if later else node


def _operand(emit: Emitter, node: Node, dtype: torch.dtype, rank: int) -> Node:
    if tensor_of(node).dtype != dtype:
        node = emit.method("to", node, dtype)
    return _four_dims(emit, node, rank)


def _bias(emit: Emitter, call: AttentionCall, rank: int, writes: Writes) -> Node | None:
    if call.bias is None:
        return None
    bias = _kept(emit, call.bias, writes)
    value = tensor_of(bias)
    if value.dtype.is_floating_point and call.bias_dtype not in (None, value.dtype):
        bias = emit.method("to", bias, call.bias_dtype)
    # Dims in front broadcast by themselves; the head dim that rank 3 lacks is in their midst.
    return emit.method("unsqueeze", bias, -3) if rank == 3 and value.dim() == 3 else bias


def _four_dims(emit: Emitter, node: Node, rank: int) -> Node:
    for _ in range(4 - rank):
        node = emit.method("unsqueeze", node, rank - 2)
    return node

"""The memory layout of an attention's result, where the program can tell it from another.

Given:  ``y = weights @ v; z = y.view(B * H, T, E)``
Result: ``y = streambp.attention(q, k, v, ...)[0].contiguous(); z = y.view(B * H, T, E)``

The op's result lies in memory as ``[B, T, H, E]``, that of a product as ``[B, H, T, E]``. Most
programs can not tell, and their ``y.transpose(1, 2).reshape(B, T, H * E)`` costs no copy then. A
view can, and so can what is written to: ``y.transpose(1, 2).contiguous()`` is a copy of one layout
and the same memory in the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from .attention_call import tensor_of
from .dynamo_calls import example_of, is_call, is_torch_function
from .dynamo_emit import Emitter
from .placement import outermost_first
from .rules.sizes import same_size
from .writes import Writes, share_memory

_VIEWS = (
    *("transpose", "swapaxes", "permute", "movedim", "unsqueeze", "squeeze", "select", "narrow"),
    *("getitem", "chunk", "split", "unbind"),
)
_COPIES = ("contiguous", "clone", "reshape", "flatten")
_OF_ONE_LAYOUT = ("contiguous", "linear", "matmul", "mm", "bmm", "addmm", "einsum")
_READ_LAYOUT = ("as_strided", "as_strided_scatter", "view", "view_as", "stride", "is_contiguous")


def taking_the_place_of(emit: Emitter, attention: Node, output: Node, writes: Writes) -> Node:
    """What stands for ``output`` from now on: ``attention``, in its layout where that matters.

    It gets the example of ``output``: by the examples, passes tell who shares whose memory.
    """
    result = attention
    wanted, given = tensor_of(output), tensor_of(attention)
    same_layout = all(map(same_size, wanted.stride(), given.stride()))
    if _can_tell(output, writes, same_layout):
        order = outermost_first(wanted)
        back = [order.index(dim) for dim in range(wanted.dim())]
        if order != sorted(order):
            attention = emit.method("permute", attention, *order)
        result = emit.method("clone", attention, memory_format=torch.contiguous_format)
        if order != sorted(order):
            # Not a view, which autograd would not let the program write to everywhere.
            result = emit.method("clone", emit.method("permute", result, *back))
    result.meta["example_value"] = output.meta["example_value"]
    return result


def _can_tell(output: Node, writes: Writes, same_layout: bool) -> bool:
    """Whether the program can tell the memory of the op's result from that of ``output``.

    By writing to it, of which the op saves more than a product does, or if it is not the
    ``same_layout``, by reading it in a way that depends on where elements lie.
    """
    pending, seen = [output], set[Node]()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if writes.writers(node):
            return True
        for user in node.users:
            if is_call(user, *_VIEWS):
                pending.append(user)
            elif is_call(user, *_COPIES):
                if writes.writers(user) or (not same_layout and _layout_is_read(user)):
                    return True
            elif not same_layout and (
                not _reads_values_alone(user, output) or _layout_is_read(user)
            ):
                return True
    return False


def _layout_is_read(node: Node) -> bool:
    """Whether the memory of what is made of ``node`` is read by strides, or as another shape.

    Most ops give their results the layout of an operand. A product and ``contiguous`` do not.
    """
    pending, seen = [node], set[Node]()
    while pending:
        node = pending.pop()
        if node in seen or is_call(node, *_OF_ONE_LAYOUT):
            continue
        seen.add(node)
        if is_call(node, *_READ_LAYOUT):
            return True
        pending += node.users
    return False


def _reads_values_alone(user: Node, output: Node) -> bool:
    """Whether a call is torch's and makes something new of the values of its operands."""
    if user.op == "output":
        return False
    if not isinstance(user.target, str) and not is_torch_function(user.target):
        return False
    return isinstance(example_of(user), Tensor) and not share_memory(user, output)

"""Finding K and V before they were repeated for grouped-query heads.

    k = k[:, :, None].expand(B, Hkv, G, S, E).reshape(B, H, S, E)      k.repeat_interleave(G, dim=1)
    k = k.expand(B, H, S, E)    (one head)                             k.repeat(1, H, 1, 1)

all make H heads of Hkv, each repeated next to itself, and the op needs none of it: grouped heads
stay grouped. Also with the heads in dim 2 and a ``transpose(1, 2)`` after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from .dynamo_calls import argument_of, is_call, value_of
from .rules.sizes import same_shape, same_size
from .writes import Writes


@dataclass(frozen=True)
class Ungrouped:
    """``source`` has its heads in ``head_dim`` of 4; it is what was repeated."""

    source: Node
    head_dim: int


def before_repeat(node: Node, at: Node, writes: Writes) -> Ungrouped | None:
    """What ``node``, ``[B, H, S, E]``, repeats each head of; ``None`` if it repeats nothing.

    ``at`` is where the result will be read: a source that is not the same then, or copies of it
    that were changed after they were made, are no repetition.
    """
    last = _through_contiguous(node)
    head_dim = 1
    if is_call(last, "transpose", "swapaxes") and _swaps_heads_and_rows(last):
        last, head_dim = _through_contiguous(last.args[0]), 2
    source = (
        _before_interleave(last, head_dim)
        or _before_expand(last, head_dim)
        or _before_one_head(last, head_dim)
    )
    if source is None:
        return None
    links = list(_links(node, source))
    changed = [writes.between(one, links[-1], at) for one in (source, *links)]
    return None if any(changed) else Ungrouped(source, head_dim)


def _links(node: Any, source: Node) -> Iterator[Node]:
    """The calls from ``node`` back to ``source``, each made of the next."""
    while node is not source:
        yield node
        node = node.args[0]


def _through_contiguous(node: Any) -> Any:
    while is_call(node, "contiguous", "clone"):
        node = node.args[0]
    return node


def _swaps_heads_and_rows(node: Node) -> bool:
    dims = (argument_of(node, 1, "dim0"), argument_of(node, 2, "dim1"))
    return value_of(node) is not None and set(dims) in ({1, 2}, {-3, -2})


def _before_interleave(node: Node, head_dim: int) -> Node | None:
    if not is_call(node, "repeat_interleave"):
        return None
    repeats, dim = argument_of(node, 1, "repeats"), argument_of(node, 2, "dim")
    if isinstance(repeats, int) and dim in (head_dim, head_dim - 4):
        return _tensor_node(node.args[0], rank=4)
    return None


def _before_expand(node: Node, head_dim: int) -> Node | None:
    """``reshape(expand(unsqueeze(x)))``, checked by shapes alone.

    The new dim comes right after the heads; an expand or repeat that enlarges this dim and no
    other, and a reshape that merges it into the heads, is a repetition next to itself.
    """
    if not is_call(node, "reshape", "view", "flatten"):
        return None
    expanded = node.args[0]
    if not is_call(expanded, "expand", "repeat", "broadcast_to"):
        return None
    unsqueezed = expanded.args[0]
    if not is_call(unsqueezed, "unsqueeze", "getitem", "view", "reshape"):
        return None
    if is_call(unsqueezed, "getitem") and not _only_adds_dims(unsqueezed.args[1]):
        return None
    source = _tensor_node(unsqueezed.args[0], rank=4)
    if source is None:
        return None
    small, wide, last = value_of(unsqueezed), value_of(expanded), value_of(node)
    if small is None or wide is None or last is None or wide.dim() != 5 or last.dim() != 4:
        return None
    before, after = value_of(source).shape[: head_dim + 1], value_of(source).shape[head_dim + 1 :]
    groups = wide.shape[head_dim + 1]
    merged = (*before[:-1], before[-1] * groups, *after)
    keeps_elements = (
        same_shape(small.shape, (*before, 1, *after))
        and same_shape(wide.shape, (*before, groups, *after))
        and same_shape(last.shape, merged)
    )
    return source if keeps_elements else None


def _only_adds_dims(index: Any) -> bool:
    """Whether an index is of ``:``, ``None`` and ``...`` alone, and takes every element."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


def _before_one_head(node: Node, head_dim: int) -> Node | None:
    if not is_call(node, "expand", "repeat", "broadcast_to"):
        return None
    source = _tensor_node(node.args[0], rank=4)
    wide = value_of(node)
    if source is None or wide is None or wide.dim() != 4:
        return None
    small = value_of(source)
    others = [dim for dim in range(4) if dim != head_dim]
    only_heads_grow = same_size(small.shape[head_dim], 1) and all(
        same_size(small.shape[dim], wide.shape[dim]) for dim in others
    )
    return source if only_heads_grow else None


def _tensor_node(node: Any, rank: int) -> Node | None:
    if not isinstance(node, Node):
        return None
    value = value_of(node)
    return node if isinstance(value, Tensor) and value.dim() == rank else None

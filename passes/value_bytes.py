"""How much memory values of a Dynamo graph take."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from streambp_fx._torch import pytree, storage_id

from .dynamo_calls import example_of
from .placement import hint_of
from .rules.sizes import product


def bytes_alive(nodes: Sequence[Node]) -> int:
    """Bytes of the values of ``nodes``, memory that they share once."""
    sizes: dict[int, int] = {}
    for node in nodes:
        for leaf in pytree.tree_leaves(example_of(node)):
            if isinstance(leaf, Tensor):
                size = hint_of(product(leaf.shape)) * leaf.element_size()
                key = storage_id(leaf)
                sizes[key] = max(sizes.get(key, 0), size)
    return sum(sizes.values())

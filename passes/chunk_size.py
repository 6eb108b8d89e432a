"""Choose how many tokens a chunk has.

Layers: about 512 tokens of the whole batch, which keeps matrix products large while a chunk's
workspace stays small beside the weights. A loop with a very wide value (the logits, or scores of
written-out attention) gets fewer tokens, so that this value stays under 64 MiB on the CPU. An
accelerator has more memory and is idle in narrow products: 256 MiB there, some 400 tokens of
fp32 logits over a vocabulary of 150,000. Where the head's weight is larger, the logits may be as
large as that, and a chunk has more tokens: each reads the weight and adds to its gradient, which
takes longer than the products once a chunk has few tokens. A CPU computes so slowly that this is
so with fewer tokens: 192 cost 1.5 % of a step of the reference benchmark over 512.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .axes import Axes, Kind
from .dataflow import bytes_of
from .placement import hint_of, value_of
from .rules.calls import constant_fill

TOKENS = 512
TOKENS_OF_LARGE_HEADS = 768
TOKENS_OF_HEADS_CPU = 192
WIDEST_BYTES_CPU = 64 * 2**20
WIDEST_BYTES = 256 * 2**20
FEWEST_TOKENS = 16


@dataclass(frozen=True)
class ChunkSizes:
    """The user's chunk sizes, or ``None`` for the default.

    A loop counts as a head if it holds the widest value of the graph.
    """

    axes: Axes
    batch: int
    widest: int
    chunk_size: int | None = None
    head_chunk_size: int | None = None
    for_accelerator: bool = False

    def is_head(self, nodes: list[Node]) -> bool:
        """Whether a loop over ``nodes`` counts as a head."""
        return _widest_of_rows(nodes, self.axes) >= self.widest

    def choose(self, nodes: list[Node]) -> int:
        """The chunk size, in tokens of each row, for a loop over ``nodes``."""
        head = self.is_head(nodes)
        if self.head_chunk_size is not None and head:
            return self.head_chunk_size
        if self.chunk_size is not None:
            return self.chunk_size
        length = max(1, hint_of(self.axes.length))
        per_token = max(1, _widest(nodes, self.axes) // length)
        on_cpu = _on_cpu(nodes) and not self.for_accelerator
        tokens, most = TOKENS, WIDEST_BYTES_CPU if on_cpu else WIDEST_BYTES
        weight = _largest_weight(nodes, self.axes) if head else 0
        if weight > most:
            tokens, most = TOKENS_OF_LARGE_HEADS, weight
        if weight and on_cpu:
            tokens = TOKENS_OF_HEADS_CPU
        return max(FEWEST_TOKENS, min(tokens // max(1, self.batch), most // per_token))


def _on_cpu(nodes: list[Node]) -> bool:
    """Whether the nodes' tensors are on the CPU."""
    values = (value_of(node) for node in nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)


def chunk_sizes(
    axes: Axes,
    nodes: list[Node],
    batch: int,
    chunk_size: int | None,
    head_chunk_size: int | None,
    *,
    for_accelerator: bool = False,
    widest: int | None = None,
) -> ChunkSizes:
    """The chunk sizes for a graph whose loop nodes are ``nodes``.

    ``widest`` has the bytes of the widest value of the program, if the graph is a part of one.
    """
    if widest is None:
        widest = _widest_of_rows(nodes, axes)
    return ChunkSizes(axes, batch, widest, chunk_size, head_chunk_size, for_accelerator)


def _largest_weight(nodes: list[Node], axes: Axes) -> int:
    """Bytes of the largest value without a sequence axis that a loop over ``nodes`` reads or makes.

    That is a weight or its gradient. A head's other values run over the sequence but for constants,
    such as the zeros that a slice's gradient is put into.
    """
    values = {*nodes, *(operand for node in nodes for operand in node.all_input_nodes)}
    weights = (
        value for value in values if axes.position(value) is None and constant_fill(value) is None
    )
    return max(map(bytes_of, weights), default=0)


def _widest(nodes: list[Node], axes: Axes) -> int:
    """Bytes of the widest value that is computed chunk by chunk.

    Sums do not count: an accumulator is as large as its weight, whatever the chunk.
    """
    return max(
        (bytes_of(node) for node in nodes if axes.kind.get(node) is Kind.STREAMED), default=0
    )


def _widest_of_rows(nodes: list[Node], axes: Axes) -> int:
    """The same without products of tokens with tokens, which grow with the sequence's length."""
    return _widest([node for node in nodes if node not in axes.columns], axes)

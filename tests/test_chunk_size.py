"""`ChunkSizes`: how many tokens of each row a loop takes at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from streambp_fx.passes.axes import Axes, Kind
from streambp_fx.passes.chunk_size import (
    FEWEST_TOKENS,
    TOKENS,
    TOKENS_OF_HEADS_CPU,
    TOKENS_OF_LARGE_HEADS,
    WIDEST_BYTES,
    WIDEST_BYTES_CPU,
    chunk_sizes,
)
from streambp_fx.passes.placement import Streamed, value_of
from streambp_fx.passes.rules.calls import constant_fill
from tests.joint_graphs import aten, axes_of, forward_graph, only, result

LENGTH = 2048


def _layer_and_head(
    batch: int = 1, vocab: int = 32, device: str = "meta"
) -> tuple[Graph, Axes, Node, Node]:
    x = torch.zeros(batch, LENGTH, 8, device=device)
    w = torch.zeros(vocab, 8, device=device)
    graph = forward_graph(lambda x, w: F.linear(x * 2, w), x, w)
    axes = axes_of(graph, Streamed(1), None, length=LENGTH, parameters=[1])
    return graph, axes, only(graph, aten.mul.Tensor), result(graph)


def test_default_counts_the_tokens_of_the_whole_batch() -> None:
    for batch in (1, 4):
        graph, axes, layer, _ = _layer_and_head(batch)
        sizes = chunk_sizes(axes, list(graph.nodes), batch, None, None)
        assert sizes.choose([layer]) == TOKENS // batch


def test_default_has_a_floor() -> None:
    graph, axes, layer, _ = _layer_and_head(100)
    sizes = chunk_sizes(axes, list(graph.nodes), 100, None, None)
    assert sizes.choose([layer]) == FEWEST_TOKENS


@pytest.mark.parametrize("device, most", [("cpu", WIDEST_BYTES_CPU), ("meta", WIDEST_BYTES)])
def test_wide_values_get_fewer_tokens(device: str, most: int) -> None:
    graph, axes, layer, head = _layer_and_head(vocab=250_000, device=device)
    sizes = chunk_sizes(axes, list(graph.nodes), 1, None, None)
    assert sizes.choose([layer]) == TOKENS
    assert sizes.choose([layer, head]) == most // (250_000 * 4) < TOKENS


@pytest.mark.parametrize(
    ("device", "width", "tokens"),
    [
        ("meta", 300, 300),
        ("meta", 900, TOKENS_OF_LARGE_HEADS),
        ("cpu", 120, 120),
        ("cpu", 300, TOKENS_OF_HEADS_CPU),
    ],
)
def test_logits_may_be_as_large_as_the_weight(device: str, width: int, tokens: int) -> None:
    vocab = 250_000
    x = torch.zeros(1, LENGTH, width, device=device)
    w = torch.zeros(vocab, width, device=device)
    graph = forward_graph(F.linear, x, w)
    axes = axes_of(graph, Streamed(1), None, length=LENGTH, parameters=[1])
    assert vocab * width * 4 > WIDEST_BYTES_CPU
    sizes = chunk_sizes(axes, list(graph.nodes), 1, None, None)
    nodes = [node for node in graph.nodes if axes.kind.get(node) is Kind.STREAMED]
    assert sizes.choose(nodes) == tokens


def test_zeros_as_long_as_the_sequence_are_no_weight() -> None:
    vocab = 250_000
    x, w = torch.zeros(1, LENGTH, 8), torch.zeros(vocab, 8)

    def padded(x: Tensor, w: Tensor) -> Tensor:
        return torch.zeros(1, LENGTH, vocab) + F.linear(x, w)

    graph = forward_graph(padded, x, w)
    axes = axes_of(graph, Streamed(1), None, length=LENGTH, parameters=[1])
    sizes = chunk_sizes(axes, list(graph.nodes), 1, None, None)
    nodes = [node for node in graph.nodes if axes.kind.get(node) is Kind.STREAMED]
    operands = [arg for node in nodes for arg in node.all_input_nodes]
    assert any(constant_fill(arg) == 0 and axes.position(arg) is None for arg in operands)
    assert sizes.choose(nodes) == WIDEST_BYTES_CPU // (vocab * 4)


def test_scores_of_written_attention_may_not() -> None:
    heads, width, vocab = 64, 5000, 50_000
    x, w = torch.zeros(1, LENGTH, width), torch.zeros(width, width)
    assert width * width * 4 > WIDEST_BYTES_CPU

    def layer_and_head(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
        keys = F.linear(x, w)[:, None, :, :8].expand(1, heads, LENGTH, 8)
        scores = (keys @ keys.mT).sigmoid()
        return F.linear(x + scores.sum((1, 3))[..., None], head)

    inputs = (x, w, torch.zeros(vocab, width))
    graph = forward_graph(layer_and_head, *inputs)
    axes = axes_of(graph, Streamed(1), None, None, length=LENGTH, parameters=[1, 2])
    sizes = chunk_sizes(axes, list(graph.nodes), 1, None, None)
    nodes = [node for node in graph.nodes if axes.kind.get(node) is Kind.STREAMED]
    layer = [node for node in nodes if value_of(node).shape[-1] != vocab]
    assert sizes.choose(layer) == WIDEST_BYTES_CPU // (heads * LENGTH * 4) < TOKENS


def test_options_win_and_the_head_has_its_own() -> None:
    graph, axes, layer, head = _layer_and_head()
    sizes = chunk_sizes(axes, list(graph.nodes), 1, 7, 3)
    assert (sizes.choose([layer]), sizes.choose([layer, head])) == (7, 3)
    sizes = chunk_sizes(axes, list(graph.nodes), 1, 7, None)
    assert (sizes.choose([layer]), sizes.choose([layer, head])) == (7, 7)


def test_weight_gradients_do_not_count_as_wide() -> None:
    # A sum's size does not depend on the chunk, however large the weight.
    x, dy = (torch.zeros(1, 64, 4096, device="meta") for _ in range(2))
    graph = forward_graph(lambda x, dy: (dy * 2)[0].t() @ x[0], x, dy)
    axes = axes_of(graph, Streamed(1), Streamed(1), length=64)
    assert axes.kind[result(graph)] is Kind.SUM
    nodes = [only(graph, aten.mul.Tensor), result(graph)]
    assert chunk_sizes(axes, list(graph.nodes), 1, None, None).choose(nodes) == TOKENS
    assert chunk_sizes(axes, list(graph.nodes), 1, 7, 5).choose([result(graph)]) == 7

"""`choose_cuts`: the forward is cut at the residual stream, one attention call a segment."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx import Node

from streambp_fx.passes.cuts import choose_cuts
from streambp_fx.passes.dataflow import read_joint
from streambp_fx.passes.placement import Streamed
from tests.joint_graphs import Analysis, axes_of, capture, forward_graph, result
from tests.own_models import NanoGPT

ATTENTION = torch.ops.streambp.attention.default
BATCH, LENGTH, HIDDEN, VOCAB = 2, 7, 8, 61


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


@functools.cache
def analysis(layers: int) -> Analysis:
    """A small GPT's analysis."""
    torch.manual_seed(0)
    model = NanoGPT(layers, hidden=HIDDEN, vocab=VOCAB).double()
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return capture(model, ids, ids).analyse()


@pytest.mark.parametrize("layers", [1, 3])
def test_each_cut_keeps_the_residual_stream_alone(layers: int) -> None:
    for cut in analysis(layers).segments.cuts:
        (value,) = cut
        assert value.meta["val"].shape == (BATCH, LENGTH, HIDDEN)


def test_embedding_layers_and_head_are_segments() -> None:
    segments = analysis(3).segments
    assert segments.count == 5
    attention = [segments.segment[node] for node in segments.flow if node.target is ATTENTION]
    assert attention == [1, 2, 3]
    (logits,) = (node for node in segments.flow if _shape(node) == (BATCH * LENGTH, VOCAB))
    assert segments.segment[logits] == 4


def test_layers_are_made_of_the_same_ops() -> None:
    segments = analysis(3).segments
    ops = [
        [node.target for node in segments.flow if segments.segment[node] == index]
        for index in (1, 2, 3)
    ]
    assert ops[0] == ops[1] == ops[2] and len(ops[0]) > 10


def test_every_value_that_crosses_a_cut_is_kept() -> None:
    segments = analysis(3).segments
    for node in segments.flow:
        for arg in node.all_input_nodes:
            if arg in segments.segment and segments.segment[arg] != segments.segment[node]:
                assert segments.segment[node] == segments.segment[arg] + 1
                assert arg in segments.cuts[segments.segment[arg]]


def test_segments_follow_the_order_of_the_graph() -> None:
    segments = analysis(3).segments
    indices = [segments.segment[node] for node in segments.flow]
    assert indices == sorted(indices) and set(indices) == set(range(segments.count))


def test_without_attention_the_cut_is_before_the_widest_value() -> None:
    x, w = torch.zeros(BATCH, LENGTH, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    graph = forward_graph(lambda x, w: torch.nn.functional.linear(x * 2, w).exp().sum(), x, w)
    axes = axes_of(graph, Streamed(1), None, length=LENGTH, parameters=[1])
    segments = choose_cuts(read_joint(graph, 1), axes)
    (cut,) = segments.cuts
    (kept,) = cut
    assert kept.target is torch.ops.aten.mul.Tensor
    assert segments.segment[result(graph)] == 1


def test_logits_in_bf16_are_no_waist() -> None:
    x, w = (torch.zeros(size, HIDDEN, dtype=torch.bfloat16) for size in (LENGTH, VOCAB))
    graph = forward_graph(lambda x, w: torch.nn.functional.linear(x, w).float().exp().sum(), x, w)
    axes = axes_of(graph, Streamed(0), None, length=LENGTH, parameters=[1])
    assert choose_cuts(read_joint(graph, 1), axes).cuts == []

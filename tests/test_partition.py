"""`split`: what forward saves for backward, and that the two halves make the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from streambp_fx.passes.lower import loop_nodes
from streambp_fx.passes.partition import split
from tests.joint_graphs import Captured, run_graph
from tests.test_rewrite import BATCH, HIDDEN, LENGTH, VOCAB, gpt


def _halves(captured: Captured) -> tuple[GraphModule, GraphModule]:
    return split(captured.rewrite(4), captured.num_forward_outputs)


def _outputs(graph_module: GraphModule) -> list[Node]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


def _saved(captured: Captured) -> list[Node]:
    """The tensors that forward computes for backward."""
    forward, _ = _halves(captured)
    outputs = _outputs(forward)[captured.num_forward_outputs :]
    return [
        node
        for node in outputs
        if node.op != "placeholder" and isinstance(node.meta["val"], Tensor)
    ]


def _shapes(nodes: list[Node]) -> list[tuple[int, ...]]:
    return sorted(tuple(node.meta["val"].shape) for node in nodes)


@pytest.mark.parametrize("layers", [2, 4])
def test_one_residual_stream_a_layer_is_saved(layers: int) -> None:
    # The input of each layer, the residual gradient that the head's loop has made, and its
    # weights' gradients (a norm's two and the tied head's).
    stream = (BATCH, LENGTH, HIDDEN)
    wanted = [stream] * (layers + 1) + [(HIDDEN,), (HIDDEN,), (VOCAB, HIDDEN)]
    assert _shapes(_saved(gpt(layers))) == sorted(wanted)


def test_casts_of_weights_are_not_saved() -> None:
    captured = gpt(autocast=True)
    forward, _ = _halves(captured)
    weights = {
        tuple(node.meta["val"].shape)
        for node in forward.graph.find_nodes(op="placeholder")
        if node.meta["val"].dim() == 2
    }
    saved = [n for n in _saved(captured) if n.meta["val"].dtype is torch.bfloat16]
    assert not [node for node in saved if tuple(node.meta["val"].shape) in weights]


def test_backward_takes_what_forward_saves_and_the_tangents() -> None:
    captured = gpt()
    forward, backward = _halves(captured)
    saved = [node.name for node in _outputs(forward)[captured.num_forward_outputs :]]
    inputs = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert inputs == [*saved, "tangents_1"]
    assert not any("tangents" in n.name for n in forward.graph.find_nodes(op="placeholder"))


def test_loops_go_to_the_half_they_belong_to() -> None:
    forward, backward = _halves(gpt(3))
    assert len(loop_nodes(forward)) == 5, "embedding, three layers, head"
    assert len(loop_nodes(backward)) == 7, "two of each of three layers, embedding"


@pytest.mark.parametrize("dynamic", [False, True])
def test_halves_make_the_whole(dynamic: bool) -> None:
    captured = gpt(dynamic=dynamic)
    forward, backward = _halves(captured)
    inputs = captured.inputs()
    expected = run_graph(captured.graph_module, inputs)
    made = run_graph(forward, captured.primals)
    known: dict[str, Any] = dict(zip((node.name for node in _outputs(forward)), made, strict=True))
    known["tangents_1"] = inputs[-1]
    placeholders = backward.graph.find_nodes(op="placeholder")
    gradients = run_graph(backward, [known[node.name] for node in placeholders])
    got = [*made[: captured.num_forward_outputs], *gradients]
    for mine, wanted in zip(got, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(mine, wanted)

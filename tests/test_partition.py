"""`split`: what forward saves for backward, and that the two halves make the whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from streambp_fx.passes.lower import loop_nodes
from streambp_fx.passes.partition import split
from tests.backend import needs_report, streamed
from tests.joint_graphs import Captured, run_graph
from tests.own_models import LogitsOnly
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


class Routed(LogitsOnly):
    """Two experts, chosen with a bias that the forward moves towards the less loaded one."""

    def __init__(self) -> None:
        super().__init__()
        width = self.head.weight.shape[1]
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.register_buffer("balance", torch.zeros(2))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.features(ids)
        gates = self.router(hidden).sigmoid()
        chosen = (gates + self.balance).argmax(-1)
        for index, expert in enumerate(self.experts):
            hidden = hidden + expert(hidden) * (gates[..., index] * (chosen == index))[..., None]
        self.balance.add_(torch.tensor([0.3, -0.2], dtype=hidden.dtype))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


@needs_report
def test_backward_reads_a_buffer_as_it_was_before_forward_changed_it() -> None:
    torch.manual_seed(0)
    model = Routed().double()
    plain = copy.deepcopy(model)
    function = streamed(model, chunk_size=4)
    ids = torch.randint(0, 131, (2, 21))
    for _ in range(2):
        right = torch.autograd.grad(plain(ids), list(plain.parameters()))
        left = torch.autograd.grad(function(ids), list(model.parameters()))
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(model.balance, plain.balance)

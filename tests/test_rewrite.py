"""`rewrite`: loops, what is left outside them, and that the numbers are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from streambp_fx.backend import BarrierWarning
from streambp_fx.passes.body import BodyCall
from streambp_fx.passes.body_builder import BodyBuilder, RewriteError
from streambp_fx.passes.inputs import InputRole
from streambp_fx.passes.lower import loop_nodes
from streambp_fx.passes.pipeline import History, Settings, stream
from streambp_fx.passes.rewrite import Rewritten
from tests.backend import last_report, needs_report, streamed
from tests.joint_graphs import (
    Captured,
    assert_same_results,
    aten,
    bodies,
    calls,
    capture,
    forward_graph,
    run_graph,
)
from tests.models import make_batch
from tests.own_models import NanoGPT

# No product of two of these equals another one, so that shapes tell what a value is.
BATCH, LENGTH, HIDDEN, VOCAB = 2, 11, 8, 61
TOKENS = {LENGTH, LENGTH - 1, BATCH * LENGTH, BATCH * (LENGTH - 1)}
CAST = torch.ops.prims.convert_element_type.default


@functools.cache
def gpt(layers: int = 2, dynamic: bool = False, autocast: bool = False, **options: Any) -> Captured:
    """A small GPT's joint graph, in float64 unless under bf16 ``autocast``."""
    torch.manual_seed(0)
    model = NanoGPT(layers, hidden=HIDDEN, vocab=VOCAB, **options)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    sizes = [(0, 1)] if dynamic else []
    if not autocast:
        model.double()
        return capture(lambda ids: model(ids, ids), ids, dynamic=sizes)
    with torch.autocast("cpu", torch.bfloat16):
        return capture(lambda ids: model(ids, ids), ids, dynamic=sizes)


def _wide(nodes: Iterable[Node]) -> list[tuple[str, tuple[int, ...]]]:
    """The values that are as large as tokens x vocabulary or tokens x tokens."""
    found = []
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            tokens = sum(size in TOKENS for size in value.shape)
            if tokens > 1 or (tokens and VOCAB in value.shape):
                found.append((str(node.target), tuple(value.shape)))
    return found


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_forward_loop_a_layer_and_two_backward_loops(layers: int) -> None:
    loops = gpt(layers).rewrite().loops
    # The first segment is the embedding, the last one the head with its own backward.
    last = layers if layers == 1 else layers + 1
    names = [f"segment{index}" for index in range(last + 1)]
    if layers > 1:
        stages = range(layers, 0, -1)
        names += [f"stage{stage}_{phase}" for stage in stages for phase in (0, 1)]
        names.append("stage0")  # the embedding's gradient
        assert [loop.name for loop in loops] == names
    assert sum(loop.descending for loop in loops) == layers
    assert all(loop.name.startswith("stage") for loop in loops if loop.descending)


def test_a_loop_node_matches_its_spec() -> None:
    rewritten = gpt().rewrite(chunk_size=4)
    for node, body in zip(
        loop_nodes(rewritten.graph_module), bodies(rewritten.graph_module), strict=True
    ):
        _, length, *operands = node.args
        assert length == LENGTH
        assert len(operands) == len(body.spec.operands)
        assert len(node.meta["val"]) == len(body.spec.results)
        assert body.spec.chunk_size == 4


def test_equal_layers_share_their_bodies() -> None:
    loops = gpt(4).rewrite()
    names = {
        spec.name: str(node.args[0].target)  # type: ignore[union-attr]
        for spec, node in zip(loops.loops, loop_nodes(loops.graph_module), strict=True)
    }
    assert len({names[f"segment{index}"] for index in (1, 2, 3, 4)}) == 1
    assert names["stage3_0"] == names["stage2_0"]
    assert names["stage3_1"] == names["stage2_1"]
    assert names["segment1"] != names["segment5"]


@pytest.mark.parametrize("written_out", [False, True])
def test_nothing_wide_is_left_outside_loops(written_out: bool) -> None:
    captured = gpt(written_out=written_out)
    before = _wide(captured.graph_module.graph.nodes)
    assert any(VOCAB in shape for _, shape in before), "the case has no logits"
    if written_out:
        assert any(VOCAB not in shape for _, shape in before), "the case has no scores"
    assert _wide(captured.rewrite().graph_module.graph.nodes) == []


def _in_bodies(rewritten: Rewritten, target: Any) -> list[BodyCall]:
    return [
        call
        for body in bodies(rewritten.graph_module)
        for call in body.plan.calls
        if call.target is target
    ]


def test_wide_constants_are_computed_inside() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        floor = torch.full((BATCH, LENGTH, VOCAB), -0.1, dtype=x.dtype)
        return torch.maximum(F.linear(x, w), floor).sum()

    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=torch.float64))
    captured = capture(program, x, w)
    wide = [n for n in calls(captured.graph_module.graph, aten.full.default) if _wide([n])]
    assert wide, "the case has no tokens x vocabulary constant"
    rewritten = captured.rewrite()
    assert any(VOCAB in call.args[0] for call in _in_bodies(rewritten, aten.full.default))


def test_masks_are_computed_inside() -> None:
    # The model's own lower triangle, compared with zero for one chunk of rows at a time.
    captured = gpt(written_out=True)
    assert any(_wide([node]) for node in calls(captured.graph_module.graph, aten.eq.Scalar))
    rewritten = captured.rewrite()
    masks = _in_bodies(rewritten, aten.eq.Scalar)
    shapes = {shape.dims for call in masks for shape in call.shapes if shape}
    assert (LENGTH, LENGTH) in shapes
    # The other comparison, of a log-sum-exp per head, finds the rows that see no key.
    assert all(
        shape[0] == BATCH and shape[2:] == (LENGTH,) for shape in shapes - {(LENGTH, LENGTH)}
    )
    # Some releases of torch compare ids with the padding index, -1; a mask is compared with zero.
    outside = calls(rewritten.graph_module.graph, aten.eq.Scalar)
    assert not any(_wide([node]) or node.args[1] != -1 for node in outside)


def _reads(node: Node, value: Node) -> bool:
    """Whether ``node`` reads ``value`` or a transpose of it."""
    transposes = [user for user in value.users if user.target is aten.permute.default]
    return node in value.users or any(_reads(node, transpose) for transpose in transposes)


def test_weights_are_cast_just_before_the_loop_that_reads_them() -> None:
    rewritten = gpt(autocast=True).rewrite()
    order = list(rewritten.graph_module.graph.nodes)
    loops = loop_nodes(rewritten.graph_module)
    casts = [
        node
        for node in calls(rewritten.graph_module.graph, CAST)
        if node.args[0].op == "placeholder"  # type: ignore[union-attr]
    ]
    forward = [node for node in casts if node in rewritten.forward_nodes]
    assert forward and len(casts) > len(forward), "backward casts again"
    for node in casts:
        position = order.index(node)
        following = next(loop for loop in loops if order.index(loop) > position)
        assert _reads(following, node), f"{node} is not for {following}"


def test_backward_reads_no_cast_of_forward() -> None:
    rewritten = gpt(autocast=True).rewrite()
    for node in calls(rewritten.graph_module.graph, CAST):
        if node in rewritten.forward_nodes and node.args[0].op == "placeholder":  # type: ignore[union-attr]
            assert all(user in rewritten.forward_nodes for user in node.users)


@pytest.mark.parametrize(
    "accumulation, dtype", [(torch.float32, torch.float32), (None, torch.bfloat16)]
)
def test_narrow_sums_are_added_up_in_the_accumulation_dtype(
    accumulation: torch.dtype | None, dtype: torch.dtype
) -> None:
    rewritten = gpt(autocast=True).rewrite(accumulation=accumulation)
    found = set()
    for node, body in zip(
        loop_nodes(rewritten.graph_module), bodies(rewritten.graph_module), strict=True
    ):
        for value, result in zip(node.meta["val"], body.spec.results, strict=True):
            if result.buffer is not None and value.dtype is torch.bfloat16:
                buffer = node.args[2 + result.buffer]
                found.add(buffer.meta["val"].dtype)
    assert found == {dtype}


@pytest.mark.parametrize("chunk_size", [1, 2, 3, LENGTH, LENGTH + 5])
def test_same_results_for_every_chunk_size(chunk_size: int) -> None:
    captured = gpt()
    assert_same_results(captured.rewrite(chunk_size), captured)


@pytest.mark.parametrize(
    "options",
    [{"tied": False}, {"written_out": True}, {"layers": 1}, {"layers": 3, "dynamic": True}],
    ids=str,
)
def test_same_results(options: dict[str, Any]) -> None:
    captured = gpt(**options)
    assert_same_results(captured.rewrite(4), captured)


def test_dynamic_length_is_an_argument_of_the_loops() -> None:
    captured = gpt(dynamic=True)
    rewritten = captured.rewrite(4)
    lengths = {node.args[1] for node in loop_nodes(rewritten.graph_module)}
    (length,) = lengths
    assert isinstance(length, Node) and length.op == "placeholder"


def _loss_and_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w).tanh()
    return y.sum() / 7, y


def _row_sums(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return y / y.exp().sum(1, keepdim=True)


def _barrier(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).sin().cumsum(1), w).tanh().sum()


@pytest.mark.parametrize("program", [_loss_and_logits, _row_sums, _barrier])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_same_results_of_small_programs(program: Callable[..., Any], chunk_size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))
    captured = capture(program, x, w)
    history = History()
    module = captured.graph_module
    expected = run_graph(module, captured.inputs())
    settings = Settings(chunk_size)
    rewritten = stream(module, captured.num_forward_outputs, captured.roles, settings, history)
    assert rewritten is not None and bool(history.barriers) == (program is _barrier)
    got = run_graph(rewritten.graph_module, captured.inputs())
    torch.testing.assert_close(got, expected)


def test_forward_alone_is_streamed() -> None:
    x, w = torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(VOCAB, HIDDEN)
    graph = forward_graph(lambda x, w: F.linear(x, w).logsumexp(-1), x, w)
    module = GraphModule(torch.nn.Module(), graph)
    roles = [InputRole.DATA, InputRole.PARAMETER]
    rewritten = stream(module, 1, roles, Settings(3), History())
    assert rewritten is not None
    assert _wide(rewritten.graph_module.graph.nodes) == []
    (got,) = run_graph(rewritten.graph_module, [x, w])
    torch.testing.assert_close(got, F.linear(x, w).logsumexp(-1))


@needs_report
def test_what_can_not_be_built_leaves_the_graph_unstreamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RewriteError("no body")

    monkeypatch.setattr(BodyBuilder, "build", refuse)
    with pytest.warns(BarrierWarning, match="no body"):
        streamed(NanoGPT())(**make_batch(BATCH, LENGTH))
    assert last_report().unstreamed == "no body"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [False, True])
def test_forward_keeps_layer_inputs_and_no_keys_or_values(causal: bool, softcap: bool) -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in (x @ w).chunk(3, -1))
        if softcap:
            scores = torch.tanh(q @ k.mT)
            scores = scores.tril() if causal else scores
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return x + mixed.squeeze(1)[..., :HIDDEN]

    def program(x: Tensor, *weights: Tensor) -> Tensor:
        x = x.sin()
        for w in weights:
            x = layer(x, w)
        return x.square().sum()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    captured = capture(
        program,
        normal(BATCH, LENGTH, HIDDEN),
        *(normal(HIDDEN, 3 * (HIDDEN + 1)) for _ in range(3)),
    )
    rewritten = captured.rewrite()
    saved = [
        node
        for node in rewritten.forward_nodes
        if node.op == "call_function"
        and any(user.op != "output" and user not in rewritten.forward_nodes for user in node.users)
    ]
    kept = [tuple(node.meta["val"].shape) for node in saved]
    assert kept.count((BATCH, LENGTH, HIDDEN)) == 3
    assert not any({HIDDEN + 1, LENGTH} <= set(shape) for shape in kept), kept

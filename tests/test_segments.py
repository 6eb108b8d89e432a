"""A training step, split at its waists into segments that are autograd nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import streambp_fx
from streambp_fx.demo import build_model
from streambp_fx.measure import memory_use
from streambp_fx.passes.captured import rewrite_captured
from streambp_fx.passes.history import History
from streambp_fx.passes.lower import compile_count
from streambp_fx.passes.segments import split_segments
from tests.backend import needs_report, streamed
from tests.models import build, make_batch
from tests.oracle import assert_exact_fp64

BATCH, LENGTH, WIDTH, HEADS, VOCAB = 2, 21, 16, 2, 23


class Layer(nn.Module):
    """``how`` says what is unlike other layers."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        split = (*h.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(h * 1.0).view(split).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q * angles.cos(), k * angles.sin(), v, attn_mask=mask)
        y = y.transpose(1, 2).reshape(h.shape)
        if self.how == "in place":
            h += y
        elif self.how == "a view in place":
            h = h + y
            h[:, 0] = 0.5
        else:
            h = h + y
        act = F.relu if self.how == "another function" else F.gelu
        h = h + self.down(act(self.up(h)))
        if self.how == "no gradient":
            with torch.no_grad():
                h = h * 1.0
        return h.detach() + 0 * h if self.how == "detached" else h


class Model(nn.Module):
    """Layers with rotary angles and a mask that is made once, an embedding and a head."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    sums_layers = False

    def hidden(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        with torch.autocast("cpu", enabled=False):
            angles = at[:, None] * (torch.arange(WIDTH // HEADS) + 0.5).to(self.head.weight.dtype)
        mask = (at[None] <= at[:, None]) & (ids != 0)[:, None, None, :] | (at[:, None] == at[None])
        hidden = [self.token(ids)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], angles, mask))
        if self.sums_layers:
            return sum(h * (number + 1) for number, h in enumerate(hidden))
        return hidden[-1]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        z = self.head(self.hidden(ids))
        return F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def made(*how: str) -> tuple[Model, tuple[Tensor, Tensor]]:
    """A model in float64, and its inputs."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return Model(*map(Layer, how)).double(), (ids, ids)


def chain_of(model: Callable[..., Any], *inputs: Tensor) -> GraphModule | None:
    """The segments of a step of ``model``."""
    found: list[GraphModule | None] = []

    def backend(graph_module: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        rewritten = copy.deepcopy(graph_module)
        rewrite_captured(rewritten, example_inputs, History(), keep_outputs=True)
        chain = split_segments(rewritten, [])
        found.append(chain and chain.graph_module)
        return (chain.graph_module if chain else graph_module).forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def step(model: nn.Module, function: Callable[..., Tensor], inputs: Any) -> dict[str, Tensor]:
    """The gradients of one step, and the loss."""
    model.zero_grad(set_to_none=True)
    loss = function(*inputs)
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {
        "loss": loss.detach(),
        **{name: grad for name, grad in grads.items() if grad is not None},
    }


def assert_equal_to_eager(model: nn.Module, inputs: Any, **options: Any) -> None:
    """Fail unless a step in segments gives what eager gives, to rounding."""
    want = step(model, model, inputs)
    options = {"chunk_size": 8, "head_chunk_size": 5, "on_barrier": "error", **options}
    got = step(model, streamed(model, **options), inputs)
    assert got.keys() == want.keys()
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-10, atol=1e-13, msg=name)


def test_before_and_after() -> None:
    chain = chain_of(*_flat(made("", "", "")))
    assert chain is not None
    calls = [node for node in chain.graph.nodes if node.op == "call_module"]
    ops = {
        str(call.target): [
            str(getattr(node.target, "__name__", node.target))
            for node in getattr(chain, str(call.target)).graph.nodes
            if node.op.startswith("call_")
        ]
        for call in calls
    }
    # What several segments read and is small for each token is computed once, in ``submod_0``.
    assert list(ops) == [f"submod_{number}" for number in range(6)]
    assert "_enter_autocast" in ops["submod_0"] and "linear" not in ops["submod_0"]
    assert ops["submod_1"] == ["embedding"]
    assert ops["submod_2"] == ops["submod_3"] == ops["submod_4"]
    assert ops["submod_3"].count("linear") == 3 and "le" in ops["submod_3"]
    assert ops["submod_5"][-1] == "cross_entropy" and "linear" in ops["submod_5"]


def _flat(pair: tuple[Model, tuple[Tensor, Tensor]]) -> tuple[Any, ...]:
    return (pair[0], *pair[1])


def test_no_mask_is_handed_from_one_segment_to_another() -> None:
    chain = chain_of(*_flat(made("", "", "")))
    assert chain is not None
    for node in chain.graph.nodes:
        if node.op == "call_module":
            inner = getattr(chain, str(node.target)).graph
            values = [one.meta["example_value"] for one in inner.find_nodes(op="placeholder")]
            assert all(list(value.shape).count(LENGTH) < 2 for value in values)


@pytest.mark.parametrize(
    "how",
    [
        *(("",), ("", ""), ("", "", ""), ("", "another function", ""), ("", "detached", "")),
        *(("", "", "no gradient"), ("", "no gradient", "", "")),
    ],
    ids=str,
)
def test_a_step_in_segments_equals_eager(how: tuple[str, ...]) -> None:
    assert_equal_to_eager(*made(*how))


@pytest.mark.parametrize(
    "how",
    [
        ("in place", "in place", "in place"),
        ("", "in place", ""),
        ("a view in place", "", "a view in place"),
    ],
    ids=str,
)
def test_layers_that_write_in_place_are_segments_too(how: tuple[str, ...]) -> None:
    model, inputs = made(*how)
    assert_equal_to_eager(model, inputs, on_barrier="ignore")
    chain = chain_of(model, *inputs)
    assert chain is not None and hasattr(chain, f"submod_{len(how) + 1}")


def test_memory_that_is_written_belongs_to_one_segment() -> None:
    model, inputs = made("", "", "")

    def writes(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
        first = model.layers[0](model.token(ids), *_angles_and_mask(ids))
        view = first[:, 0]
        second = model.layers[1](first, *_angles_and_mask(ids))
        first += second  # which `view` shows, so that it can be no new value
        hidden = model.layers[2](first, *_angles_and_mask(ids)) + view[:, None]
        return F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())

    want = step(model, lambda *given: writes(model, *given), inputs)
    got = step(model, streamed(lambda *given: writes(model, *given), chunk_size=8), inputs)
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-10, atol=1e-13)
    report = streambp_fx.last_report()
    if report is not None:
        assert len(report.segments) < 5
        assert any("memory that is written in place" in note for note in report.notes)


def _angles_and_mask(ids: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(ids.shape[1])
    angles = at[:, None] * (torch.arange(WIDTH // HEADS) + 0.5)
    return angles.double(), at[None] <= at[:, None]


@pytest.mark.parametrize("how", ["autocast", "no_grad"])
def test_layers_in_a_region_are_segments_in_the_same_one(how: str) -> None:
    model, inputs = made("", "", "")
    model = model.float() if how == "autocast" else model

    def program(ids: Tensor, labels: Tensor) -> Tensor:
        if how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(ids, labels)
        with torch.no_grad():
            known = model(ids, labels)
        return model(ids, labels) * (1 + known)

    want = step(model, program, inputs)
    got = step(model, streamed(program, chunk_size=8), inputs)
    for name, right in want.items():
        error = (got[name] - right).norm() / right.norm()
        assert error <= (2e-2 if how == "autocast" else 1e-12), name
    report = streambp_fx.last_report()
    assert report is None or (report.segments.count(1) > 1 and len(report.segments) >= 5)


def test_casts_of_weights_are_made_by_the_segments_that_read_them() -> None:
    model, inputs = made("", "", "")

    def program(ids: Tensor, labels: Tensor) -> Tensor:
        weight = model.head.weight.mT * 1.0  # before all layers
        hidden = model.hidden(ids)
        return F.cross_entropy((hidden @ weight).flatten(0, 1), labels.flatten())

    want = step(model, program, inputs)
    got = step(model, streamed(program, chunk_size=8), inputs)
    assert got.keys() == want.keys()
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-10, atol=1e-13)
    chain = chain_of(program, *inputs)
    assert chain is not None
    crossing = [node for node in chain.graph.nodes if node.op == "call_function"]
    assert all("mul" not in node.name for node in crossing)


@needs_report
def test_equal_layers_are_traced_and_compiled_once() -> None:
    def bodies(layers: int) -> int:
        before = compile_count.bodies
        model, inputs = made(*[""] * layers)
        step(model, streamed(model, compile_bodies=True, chunk_size=8), inputs)
        return compile_count.bodies - before

    few = bodies(2)
    assert bodies(6) <= few
    report = streambp_fx.last_report()
    assert report is not None
    names = [loop.name for loop in report.loops]
    assert names[0] == "segment0" and names[-1] == "stage0"
    assert len(names) == len(set(names))


def test_gradients_leave_as_their_segment_ends() -> None:
    model, inputs = made("", "", "")
    order: list[str] = []
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    step(model, streamed(model, chunk_size=8), inputs)
    parts = [name.split(".")[1] if "layers" in name else name.split(".")[0] for name in order]
    assert len(order) == len(set(order)) == len(list(model.parameters()))
    assert list(dict.fromkeys(parts)) == ["head", "2", "1", "0", "token"]


def test_a_step_frees_the_gradients_that_an_optimizer_has_used() -> None:
    model = build_model(layers=8, width=64, vocabulary=64, intermediate=192, heads=2)
    ids = torch.randint(0, 64, (1, 32))
    function = streamed(model, chunk_size=16, lowered=False)

    def one_step() -> None:
        function(input_ids=ids, labels=ids).loss.backward()

    def used(weight: nn.Parameter) -> None:
        weight.grad = None

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(used)
    one_step()
    peak = memory_use(one_step).peak
    gradients = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert peak < 0.4 * gradients


def test_saved_tensors_hooks_see_the_cuts() -> None:
    model, inputs = made("", "", "")
    function = streamed(model, chunk_size=8)
    want = step(model, function, inputs)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        got = step(model, function, inputs)
    hidden = [tensor for tensor in packed if tensor.shape == (BATCH, LENGTH, WIDTH)]
    assert len(hidden) == 4  # the inputs of three layers, and the head's
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=0, atol=0)


def test_checkpoint_around_a_model_keeps_its_input_alone() -> None:
    model, inputs = made("", "", "")
    want = step(model, model, inputs)
    function = streamed(model, chunk_size=8)
    got = step(model, lambda *given: checkpoint(function, *given, use_reentrant=False), inputs)
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-10, atol=1e-13)


def test_gradient_of_one_layer_alone() -> None:
    model, inputs = made("", "", "")
    target = model.layers[1].up.weight
    (want,) = torch.autograd.grad(model(*inputs), target)
    loss = streamed(model, chunk_size=8)(*inputs)
    (got,) = torch.autograd.grad(loss, target, retain_graph=True)
    (again,) = torch.autograd.grad(loss, target)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(again, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gptneox"])
def test_hugging_face_models(name: str, dynamic: bool) -> None:
    assert_exact_fp64(build(name), make_batch(2, LENGTH), chunk_size=8, dynamic=dynamic)


def test_autocast_around_a_step() -> None:
    torch.manual_seed(0)
    model, inputs = made("", "")
    model = model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = step(model, model, inputs)
        got = step(model, streamed(model, chunk_size=8), inputs)
    for name, right in want.items():
        assert (got[name] - right).norm() <= 0.05 * right.norm(), name


def test_frozen_layers_before_the_trained_ones_stream_too() -> None:
    model, inputs = made("", "", "")
    for part in (model.token, model.layers[0]):
        part.requires_grad_(False)
    assert_equal_to_eager(model, inputs)
    report = streambp_fx.last_report()
    assert report is not None
    assert [loop.name for loop in report.loops if "segment" in loop.name] == [
        f"segment{number}" for number in range(5)
    ]


def test_values_that_skip_over_layers_go_straight_to_those_that_read_them() -> None:
    model, inputs = made("", "", "", "")
    model.sums_layers = True
    assert_equal_to_eager(model, inputs)
    chain = chain_of(model, *inputs)
    assert chain is not None and hasattr(chain, "submod_6")


def test_what_segments_keep_may_wait_on_the_cpu() -> None:
    model, inputs = made("", "", "")
    function = streamed(model, chunk_size=8)
    want = step(model, function, inputs)
    with torch.autograd.graph.save_on_cpu():
        got = step(model, function, inputs)
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=0, atol=0)


def test_as_many_tokens_as_a_hidden_state_is_wide() -> None:
    model, (ids, labels) = made("", "", "")
    inputs = (ids[:, :WIDTH], labels[:, :WIDTH])
    chain = chain_of(model, *inputs)
    assert chain is not None and hasattr(chain, "submod_5")
    assert_equal_to_eager(model, inputs)


@needs_report
def test_where_a_program_is_not_cut_the_report_says_why() -> None:
    model, inputs = made("", "", "")

    def by_strides(ids: Tensor, labels: Tensor) -> Tensor:
        hidden = model.hidden(ids)
        again = torch.as_strided(hidden, hidden.shape, hidden.stride())
        return F.cross_entropy(model.head(again).flatten(0, 1), labels.flatten())

    want = step(model, by_strides, inputs)
    got = step(model, streamed(by_strides, chunk_size=8, on_barrier="ignore"), inputs)
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-10, atol=1e-13)
    report = streambp_fx.last_report()
    assert report is not None and report.segments == (0,)
    assert any("reads memory by strides" in note for note in report.notes)

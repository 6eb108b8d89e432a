"""What autograd promises holds: upstream gradients, hooks, retained graphs, frozen weights.

Everything in float64 and equal to eager.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backend import streamed
from tests.marks import slow_but
from tests.models import UPCAST, Batch, build, loss_of, make_batch, make_dtype_preserving
from tests.oracle import assert_exact_fp64, assert_same_grads, assert_same_step, run
from tests.own_models import LogitsOnly, NanoGPT, add_low_rank

CHUNK = 8
LENGTH = 21


def _nano() -> tuple[Any, Batch]:
    return build("nanogpt").double(), make_batch(2, LENGTH)


def _weights(model: nn.Module) -> list[Tensor]:
    return [weight for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize(
    ("name", "factor"),
    slow_but(
        [("nanogpt", 1 / 3), ("nanogpt", 0.0), ("llama", 4.0)],
        itertools.product(["nanogpt", "llama"], [1 / 3, 4.0, 0.0, -1.0]),
    ),
)
def test_upstream_gradient_multiplies_every_gradient(name: str, factor: float) -> None:
    def loss(function: Callable[..., Any], batch: Batch) -> Tensor:
        return loss_of(function(**batch)) * factor

    assert_exact_fp64(build(name), make_batch(2, LENGTH), loss=loss, chunk_size=CHUNK)


def test_factor_inside_the_compiled_function() -> None:
    model, batch = _nano()
    want = run(model, batch, loss=lambda f, b: f(**b) / 4)
    got = run(model, batch, streamed(lambda **b: model(**b) / 4, chunk_size=CHUNK))
    assert_same_step(got, want)


def test_autograd_grad_equals_backward() -> None:
    model, batch = _nano()
    function = streamed(model, chunk_size=CHUNK)
    got = torch.autograd.grad(function(**batch), _weights(model))
    names = [name for name, _ in model.named_parameters()]
    assert_same_grads(dict(zip(names, got, strict=True)), run(model, batch).grads)
    assert all(weight.grad is None for weight in model.parameters())


def test_gradient_of_one_weight_only() -> None:
    model, batch = _nano()
    target = model.blocks[0].up.weight
    (want,) = torch.autograd.grad(model(**batch), target)
    (got,) = torch.autograd.grad(streamed(model, chunk_size=CHUNK)(**batch), target)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


def test_backward_twice_over_a_retained_graph() -> None:
    model, batch = _nano()
    want = run(model, batch).grads
    loss = streamed(model, chunk_size=CHUNK)(**batch)
    loss.backward(retain_graph=True)
    once = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    (loss * 3).backward()
    assert_same_grads(once, want)
    four = {name: weight.grad / 4 for name, weight in model.named_parameters()}
    assert_same_grads(four, want)


def test_graph_is_retained_after_backwards_that_did_not() -> None:
    model, batch = _nano()
    want = run(model, batch).grads
    function = streamed(model, chunk_size=CHUNK)
    function(**batch).backward()
    model.zero_grad(set_to_none=True)
    loss = function(**batch)
    loss.backward(retain_graph=True)
    loss.backward()
    twice = {name: weight.grad / 2 for name, weight in model.named_parameters()}
    assert_same_grads(twice, want)


def test_backward_twice_without_retaining_raises() -> None:
    model, batch = _nano()
    loss = streamed(model, chunk_size=CHUNK)(**batch)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("after_a_step", [False, True])
def test_double_backward_raises(after_a_step: bool) -> None:
    model, batch = _nano()
    function = streamed(model, chunk_size=CHUNK)
    if after_a_step:
        function(**batch).backward()
    loss = function(**batch)
    with pytest.raises(RuntimeError, match=r"double backward|higher.order|does not currently"):
        grads = torch.autograd.grad(loss, _weights(model), create_graph=True)
        torch.stack([grad.pow(2).sum() for grad in grads]).sum().backward()


def test_gradients_accumulate_over_micro_batches() -> None:
    model, _ = _nano()
    batches = [make_batch(1, 11, seed=1), make_batch(1, 29, seed=2)]

    def accumulate(function: Callable[..., Any]) -> dict[str, Tensor | None]:
        model.zero_grad(set_to_none=True)
        for batch in batches:
            (function(**batch) / 2).backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    got = accumulate(streamed(model, chunk_size=CHUNK))
    assert_same_grads(got, accumulate(model))


def test_token_count_of_the_whole_step_as_normaliser() -> None:
    """``num_items_in_batch``: two micro-batches add up to the one large batch."""
    model = make_dtype_preserving(build("llama"))
    large = make_batch(2, LENGTH)
    count = (large["labels"][:, 1:] != -100).sum()
    rows = [{key: value[row : row + 1] for key, value in large.items()} for row in range(2)]
    want = run(model, {**large, "num_items_in_batch": count}).grads
    function = streamed(model, chunk_size=CHUNK)
    model.zero_grad(set_to_none=True)
    for row in rows:
        function(**row, num_items_in_batch=count).loss.backward()
    got = {name: weight.grad for name, weight in model.named_parameters()}
    assert_same_grads(got, want)


class TwoLosses(LogitsOnly):
    """Cross entropy, and the mean square of the head's input, as two outputs."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.features(input_ids)
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        return loss, x.pow(2).mean()


@pytest.mark.parametrize("weights", [(0.5, 3.0), (1.0, 0.0)])
def test_two_losses_each_with_its_own_weight(weights: tuple[float, float]) -> None:
    torch.manual_seed(0)

    def loss(function: Callable[..., Any], batch: Batch) -> Tensor:
        first, second = function(**batch)
        return weights[0] * first + weights[1] * second

    assert_exact_fp64(TwoLosses(), make_batch(2, LENGTH), loss=loss, chunk_size=CHUNK)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_losses(which: int) -> None:
    torch.manual_seed(0)
    model, batch = TwoLosses().double(), make_batch(2, LENGTH)
    weights = dict(model.named_parameters())

    def grads(outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor | None]:
        # An unused weight may be answered with zeros, which mean the same as None.
        found = torch.autograd.grad(outputs[which], list(weights.values()), allow_unused=True)
        return {
            name: torch.zeros_like(weight) if grad is None else grad
            for (name, weight), grad in zip(weights.items(), found, strict=True)
        }

    got = grads(streamed(model, chunk_size=CHUNK)(**batch))
    assert_same_grads(got, grads(model(**batch)))


def test_gradient_with_respect_to_input_embeddings() -> None:
    model = make_dtype_preserving(build("llama"))
    batch = make_batch(2, LENGTH)
    ids = batch.pop("input_ids")

    def step(function: Callable[..., Any]) -> Tensor:
        embeds = model.model.get_input_embeddings()(ids).detach().requires_grad_()
        function(inputs_embeds=embeds, **batch).loss.backward()
        assert embeds.grad is not None
        return embeds.grad

    got = step(streamed(model, chunk_size=CHUNK))
    torch.testing.assert_close(got, step(model), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    "frozen",
    slow_but(
        ["head", "token", "blocks.0", "blocks"],
        ["head", "token", "blocks.0", "blocks.1", "blocks", "norm", "position"],
    ),
)
def test_frozen_weights_get_no_gradient(frozen: str) -> None:
    torch.manual_seed(0)
    model = NanoGPT(tied=False)
    model.get_submodule(frozen).requires_grad_(False)
    assert_exact_fp64(model, make_batch(2, LENGTH), chunk_size=CHUNK)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", ("q_proj", "v_proj")),
        ("llama", ("lm_head",)),
        ("llama", ("q_proj", "down_proj", "lm_head")),
        ("nanogpt", ("qkv", "down")),
    ],
    ids=["attention", "head", "all", "fused_qkv"],
)
def test_low_rank_adapters(name: str, layers: tuple[str, ...]) -> None:
    model = add_low_rank(build(name), *layers)
    assert_exact_fp64(model, make_batch(2, LENGTH), chunk_size=CHUNK)


@pytest.mark.parametrize(
    ("name", "tied"),
    slow_but(
        [("llama", True), ("gemma", False)],
        itertools.product(["llama", "gemma", "cohere"], [True, False]),
    ),
)
def test_tied_and_untied_embeddings(name: str, tied: bool) -> None:
    model = build(name, tie_word_embeddings=tied)
    weights = dict(model.named_parameters())
    assert ("lm_head.weight" in weights) is not tied
    assert_exact_fp64(model, make_batch(2, LENGTH), chunk_size=CHUNK)


class Checkpointed(NanoGPT):
    """Each block under `torch.utils.checkpoint`, inside of the compiled function."""

    def features(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


def test_checkpointed_blocks() -> None:
    torch.manual_seed(0)
    assert_exact_fp64(Checkpointed(), make_batch(2, LENGTH), chunk_size=CHUNK)


@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gpt2"]))
def test_gradient_checkpointing_of_transformers(name: str) -> None:
    model = build(name).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = {**make_batch(2, LENGTH), "use_cache": False}
    want = run(model, batch)
    assert_same_step(run(model, batch, streamed(model, chunk_size=CHUNK)), want, UPCAST)


def test_hooks_on_weights_fire_once() -> None:
    model, batch = _nano()
    fired: dict[str, int] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        def count(weight: Tensor) -> None:
            assert weight.grad is not None
            fired[name] = fired.get(name, 0) + 1

        return count

    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(hook(name))
    streamed(model, chunk_size=CHUNK)(**batch).backward()
    assert fired == {name: 1 for name, _ in model.named_parameters()}


def test_hook_may_replace_a_gradient() -> None:
    model, batch = _nano()
    model.head.weight.register_hook(lambda grad: grad * 2)
    want = run(model, batch)
    assert_same_step(run(model, batch, streamed(model, chunk_size=CHUNK)), want)


def test_gradients_have_the_strides_of_their_weights() -> None:
    """Otherwise AccumulateGrad copies each of them rather than keep it."""
    model, batch = _nano()
    streamed(model, chunk_size=CHUNK)(**batch).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.stride() == weight.stride(), name


def test_inputs_and_weights_are_left_as_they_were() -> None:
    model, batch = _nano()
    before = copy.deepcopy((model.state_dict(), batch))
    run(model, batch, streamed(model, chunk_size=CHUNK))
    torch.testing.assert_close((model.state_dict(), batch), before, rtol=0, atol=0)


def test_training_for_several_steps_follows_eager() -> None:
    def train(compiled: bool) -> list[float]:
        model, _ = _nano()
        function = streamed(model, chunk_size=CHUNK) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(5):
            loss = function(**make_batch(2, LENGTH, seed=step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert train(compiled=True) == pytest.approx(train(compiled=False), rel=1e-9)


@pytest.mark.parametrize("name", ["nanogpt", "llama"])
def test_evaluation_without_gradients(name: str) -> None:
    model = make_dtype_preserving(build(name)).eval()
    batch = make_batch(2, LENGTH)
    function = streamed(model, chunk_size=CHUNK)
    with torch.no_grad():
        got, want = loss_of(function(**batch)), loss_of(model(**batch))
    assert not got.requires_grad
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(loss_of(function(**batch)), want, rtol=1e-12, atol=0)


def test_training_then_evaluation_then_training() -> None:
    model, batch = _nano()
    want = run(model, batch)
    function = streamed(model, chunk_size=CHUNK)
    assert_same_step(run(model, batch, function), want)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(function(**batch), want.loss, rtol=1e-12, atol=0)
    model.train()
    assert_same_step(run(model, batch, function), want)


def test_two_models_compiled_at_once() -> None:
    batch = make_batch(2, LENGTH)
    models = [build("nanogpt", seed=seed).double() for seed in range(2)]
    wants = [run(model, batch) for model in models]
    functions = [
        streamed(models[0], chunk_size=CHUNK),
        streamed(models[1], chunk_size=5, fresh=False),
    ]
    for model, function, want in zip(models, functions, wants, strict=True):
        assert_same_step(run(model, batch, function), want)


def test_loss_from_hidden_states_shared_with_an_auxiliary_loss() -> None:
    """What the loss reads must survive unchanged for another reader of it."""

    class Shared(LogitsOnly):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            logits = torch.tanh(self.head(self.features(input_ids)))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return loss + logits.pow(2).mean()

    torch.manual_seed(0)
    assert_exact_fp64(Shared(), make_batch(2, LENGTH), chunk_size=CHUNK)

"""The pass that takes large outputs out of a graph, followed by a plain compiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from streambp_fx.deferred import DeferredTensor
from streambp_fx.deferred_values import DeferredOutputError
from streambp_fx.passes.defer_outputs import defer_outputs
from tests.deferring import Backend, Head, is_deferred, tiny_llama, token_ids


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


@pytest.fixture
def llama() -> nn.Module:
    return tiny_llama()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [True, False])
def test_llama_logits_equal_eager(llama: nn.Module, dynamic: bool, grad: bool) -> None:
    backend, ids = Backend(), token_ids()
    compiled = torch.compile(llama, backend=backend, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        want, out = llama(input_ids=ids, labels=ids), compiled(input_ids=ids, labels=ids)
    assert isinstance(out.logits, DeferredTensor) and type(out) is type(want)
    assert out.logits.shape == want.logits.shape and out.logits.requires_grad == grad
    assert (out.logits.grad_fn is not None) == grad
    torch.testing.assert_close(out.loss, want.loss)
    torch.testing.assert_close(out.logits.detach() + 0, want.logits.detach())


def test_repeated_calls_do_not_recompile(llama: nn.Module) -> None:
    backend, ids = Backend(), token_ids()
    compiled = torch.compile(llama, backend=backend, dynamic=False)
    for _ in range(3):
        compiled(input_ids=ids, labels=ids).loss.backward()
    assert len(backend.deferrals) == 1


def test_llama_gradients_equal_eager(llama: nn.Module) -> None:
    ids = token_ids()
    compiled = torch.compile(llama, backend=Backend())
    want = torch.autograd.grad(llama(input_ids=ids, labels=ids).loss, list(llama.parameters()))
    first, second = (compiled(input_ids=ids, labels=ids) for _ in range(2))
    assert first.logits.argmax(-1).shape == ids.shape
    for out in (second, first):
        got = torch.autograd.grad(out.loss, list(llama.parameters()))
        torch.testing.assert_close(got, want)


def test_graph_keeps_loss_and_the_input_of_the_head() -> None:
    backend, model = Backend(), Head()
    torch.compile(model, backend=backend)(token_ids())
    outputs: Any = backend.deferrals[0].graph.graph.output_node().args[0]
    loss, hidden = outputs
    assert loss.meta["example_value"].shape == ()
    assert hidden.target == "detach"
    assert not hidden.meta["example_value"].requires_grad
    (head,) = (node for node in hidden.args[0].users if node is not hidden)
    assert head.target is F.linear


def test_cache_is_left_out_and_its_reading_names_the_option(llama: nn.Module) -> None:
    out = torch.compile(llama, backend=Backend())(input_ids=token_ids(), labels=token_ids())
    keys = out.past_key_values.layers[0].keys
    assert keys.shape == (2, 2, 11, 8)
    with pytest.raises(DeferredOutputError, match=r"keep_outputs.*use_cache=False"):
        keys.sum()


def test_keep_outputs_changes_nothing(llama: nn.Module) -> None:
    backend = Backend(keep_outputs=True)
    out = torch.compile(llama, backend=backend)(input_ids=token_ids(), labels=token_ids())
    assert backend.deferrals[0].deferred == ()
    assert type(out.logits) is Tensor and out.past_key_values.layers[0].keys.sum().isfinite()
    out.logits.sum().backward()


def test_without_a_loss_nothing_is_deferred() -> None:
    backend = Backend()
    model = Head()
    logits = torch.compile(lambda ids: model(ids)[1], backend=backend)(token_ids())
    assert type(logits) is Tensor and backend.deferrals[0].deferred == ()


def test_a_scalar_metric_without_gradient_is_no_loss() -> None:
    def function(ids: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = model(ids)
        return loss.detach(), logits

    backend, model = Backend(), Head()
    _, logits = torch.compile(function, backend=backend)(token_ids())
    assert backend.deferrals[0].deferred == () and logits.grad_fn is not None


@torch._dynamo.allow_in_graph
def _by_rows(x: Tensor) -> Tensor:
    return x / x.shape[0]


FINISHES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "softcap": (lambda x: torch.tanh(x / 30) * 30, True),
    "wide softcap": (lambda x: (torch.tanh(x.double() / 30) * 30).to(x.dtype), True),
    "scale": (lambda x: x * 0.25, True),
    "pad": (lambda x: F.pad(x, (0, 3)), False),
    "slice": (lambda x: x[..., :90], False),
    "softmax over tokens": (lambda x: x.softmax(1), False),
    "a function that may read the shape": (_by_rows, False),
}


@pytest.mark.parametrize("name", FINISHES)
def test_what_follows_the_head_is_run_again(name: str) -> None:
    finish, rowwise = FINISHES[name]
    backend, model = Backend(), Head(finish=finish)
    _, logits = torch.compile(model, backend=backend)(token_ids())
    (plan,) = backend.deferrals[0].deferred
    assert plan.recipe.graph is not None and plan.recipe.rowwise == rowwise
    assert plan.held == 2 * 11 * 16 * 4
    want = model(token_ids())[1].detach()
    torch.testing.assert_close(logits[:, -1].detach() + 0, want[:, -1])
    torch.testing.assert_close(logits[0, 2:5].detach() + 0, want[0, 2:5])
    torch.testing.assert_close(logits.detach() + 0, want)


@pytest.mark.parametrize("form", ["itself", "bias"])
def test_rows_that_depend_on_other_rows_are_not_computed_alone(form: str) -> None:
    model, ids = nn.Embedding(50, 16), torch.arange(80) % 50
    bias = torch.randn(80, 80) if form == "bias" else None
    weight = nn.Parameter(torch.randn(80, 16))

    def function(ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model(ids)
        similar = F.linear(hidden, hidden if form == "itself" else weight, bias)
        return similar.square().mean(), similar

    backend = Backend()
    _, similar = torch.compile(function, backend=backend)(ids)
    (plan,) = backend.deferrals[0].deferred
    assert plan.recipe.graph is not None and not plan.recipe.rowwise
    torch.testing.assert_close(similar[3:5].detach() + 0, function(ids)[1][3:5].detach())


@pytest.mark.parametrize(
    "finish",
    [lambda x: F.dropout(x, 0.5), lambda x: x.mul_(2), lambda x: x * torch.rand_like(x)],
    ids=["dropout", "in place", "rand_like"],
)
def test_what_can_not_be_run_again_is_kept_itself(finish: Callable[[Tensor], Tensor]) -> None:
    backend, model = Backend(), Head(finish=finish)
    torch.manual_seed(7)
    loss, logits = torch.compile(model, backend=backend)(token_ids())
    (plan,) = backend.deferrals[0].deferred
    assert plan.held == plan.saved
    torch.testing.assert_close(logits.detach().logsumexp(-1).mean(), loss.detach())


def test_fewer_classes_than_hidden_units_are_kept_themselves() -> None:
    backend, model = Backend(), Head(vocabulary=5)
    _, logits = torch.compile(model, backend=backend)(token_ids())
    assert backend.deferrals[0].deferred[0].held == 2 * 11 * 5 * 4
    torch.testing.assert_close(logits.detach() + 0, model(token_ids())[1].detach())


def test_repeated_and_small_outputs() -> None:
    def function(ids: Tensor) -> Any:
        loss, logits = model(ids)
        return logits, loss, logits, logits.argmax(-1), logits.float().logsumexp(-1)

    model = Head()
    first, _, again, best, per_token = torch.compile(function, backend=Backend())(token_ids())
    assert first is again and isinstance(first, DeferredTensor)
    assert type(best) is Tensor and type(per_token) is Tensor and per_token.requires_grad
    per_token.sum().backward()
    torch.testing.assert_close(best, first.argmax(-1))


def test_hidden_states_are_given() -> None:
    def function(ids: Tensor) -> Any:
        early = model.embed(ids)
        hidden = model.inner(early).tanh()
        logits = model.head(hidden)
        return logits.logsumexp(-1).mean(), logits, hidden, early * 2

    model = Head()
    out = torch.compile(function, backend=Backend())(token_ids())
    want = function(token_ids())
    for position in (1, 2, 3):
        torch.testing.assert_close(out[position].detach() + 0, want[position].detach())
    with pytest.raises(DeferredOutputError, match="keep_outputs"):
        (out[0] + out[3].sum()).backward()


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_of_the_call_is_that_of_the_computation(inside: bool) -> None:
    model = Head()

    region = torch.autocast("cpu", torch.bfloat16)

    def function(ids: Tensor) -> tuple[Tensor, Tensor]:
        with region if inside else nullcontext():
            return model(ids)

    with nullcontext() if inside else region:
        _, logits = torch.compile(function, backend=Backend())(token_ids())
        want = function(token_ids())[1]
    assert is_deferred(logits) and logits.dtype is want.dtype is torch.bfloat16
    assert torch.equal(logits.detach() + 0, want.detach())


def test_symbolic_sizes_add_no_guard() -> None:
    added: list[int] = []

    def backend(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        (size, *_) = [value for value in inputs if isinstance(value, torch.SymInt)]
        before = len(size.node.shape_env.guards)
        assert defer_outputs(gm, inputs, keep_outputs=False).deferred
        added.append(len(size.node.shape_env.guards) - before)
        return gm.forward

    model = Head(finish=lambda x: x * x.shape[1])
    torch.compile(model, backend=backend, dynamic=True)(token_ids())
    assert added == [0]

"""A pass that raises leaves the graph unstreamed, as it was, and is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from streambp_fx._torch import aot_autograd
from streambp_fx.backend import BarrierError, BarrierWarning
from streambp_fx.deferred import DeferredTensor
from streambp_fx.passes.captured import Untouched, rewrite_captured
from streambp_fx.passes.pipeline import History
from tests.backend import last_report, needs_report, streamed
from tests.models import make_batch
from tests.oracle import assert_same_step, run
from tests.own_models import NanoGPT

pytestmark = needs_report

CAPTURED = ("equate_token_shapes", "normalize_attention", "defer_outputs", "slice_early")
JOINT = {
    "replay_random_ops": "pipeline",
    "normalize": "pipeline",
    "simplify_causal_masks": "pipeline",
    "choose_cuts": "one_axis",
    "fuse_head": "one_axis",
    "rewrite": "one_axis",
}
PLACES = dict.fromkeys(CAPTURED, "passes.captured")
PLACES |= {name: f"passes.{file}" for name, file in JOINT.items()}


class Checkpointed(NanoGPT):
    """Its layers are bodies of higher-order ops; the logits are returned beside the loss."""

    def features(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = self.head(self.features(input_ids))
        shifted = logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(shifted, labels[:, 1:].flatten()), logits


def _first(function: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = function(**batch)[0]
    return loss


def _fail_after(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Let the pass ``name`` do its work, ruin the graph that it was given, and raise then."""
    module = import_module(f"streambp_fx.{PLACES[name]}")
    original = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        if isinstance(args[0], GraphModule):
            args[0].graph.output_node().args = ((),)
        raise error

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize("name", PLACES)
def test_a_pass_that_raises_leaves_the_step_right_and_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Checkpointed().double(), make_batch(2, 13)
    want = run(model, batch, loss=_first)
    _fail_after(monkeypatch, name, KeyError("no such node"))
    function = streamed(model, chunk_size=4)
    with pytest.warns(BarrierWarning, match=f"{name} failed: KeyError: 'no such node'"):
        logits = function(**batch)[1]
    assert last_report().unstreamed == f"{name} failed: KeyError: 'no such node'"
    assert last_report().loops == ()
    assert isinstance(logits, DeferredTensor) == (name in JOINT)
    torch.testing.assert_close(logits, model(**batch)[1], rtol=1e-10, atol=1e-10)
    assert_same_step(run(model, batch, function, loss=_first), want)


@pytest.mark.parametrize("name", ["slice_early", "rewrite"])
def test_a_pass_that_raises_is_an_error_where_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_after(monkeypatch, name, RecursionError("too deep"))
    function = streamed(NanoGPT(), chunk_size=4, on_barrier="error")
    with pytest.raises(Exception, match=f"{name} failed: RecursionError: too deep") as caught:
        function(**make_batch(2, 13))
    chain = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    barrier = next(error for error in chain if isinstance(error, BarrierError))
    assert isinstance(barrier.__cause__, RecursionError)


def test_the_traceback_is_logged_at_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_after(monkeypatch, "rewrite", KeyError("no such node"))
    with TestCase().assertLogs("streambp_fx", "DEBUG") as logged, pytest.warns(BarrierWarning):
        streamed(NanoGPT(), chunk_size=4)(**make_batch(2, 13))
    records = [record for record in logged.records if record.exc_info]
    assert records  # one for each distinct segment
    for record in records:
        assert record.levelno == logging.DEBUG
        assert record.exc_info[0] is KeyError  # type: ignore[index]


def test_what_is_brought_back_is_the_captured_graph_with_its_subgraphs_and_sources() -> None:
    seen: list[tuple[str, ...]] = []

    def readable(graph_module: GraphModule) -> tuple[str, ...]:
        sources = [n._dynamo_source.name for n in graph_module.graph.find_nodes(op="placeholder")]
        return graph_module.print_readable(print_output=False), *sources

    def backend(graph_module: GraphModule, inputs: list[Any]) -> Any:
        seen.append(readable(graph_module))
        untouched = Untouched(graph_module)
        rewrite_captured(graph_module, inputs, History(), keep_outputs=False)
        seen.append(readable(graph_module))
        untouched.restore()
        seen.append(readable(graph_module))
        return aot_autograd(fw_compiler=lambda graph, _: graph)(graph_module, inputs)

    torch._dynamo.reset()
    model, batch = Checkpointed().double(), make_batch(2, 13)
    got = torch.compile(model, backend=backend)(**batch)[0]
    before, changed, after = seen
    assert "streambp.attention" in changed[0] and "streambp.attention" not in before[0]
    assert after == before
    torch.testing.assert_close(got, model(**batch)[0], rtol=1e-10, atol=1e-10)

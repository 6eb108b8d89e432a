"""Logits that leave a graph before the loss are reported; a message told once does not do that."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.utils.logging import get_logger

from streambp_fx._torch import ignore_messages_told_once
from streambp_fx.backend import BarrierWarning
from streambp_fx.passes.barrier import Barrier
from streambp_fx.passes.whole_outputs import whole_outputs
from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.models import build, make_batch, make_dtype_preserving
from tests.oracle import assert_same_step, run
from tests.own_models import HIDDEN, VOCAB, LogitsOnly, NanoGPT

pytestmark = needs_report
BATCH, LENGTH = 2, 13
logger = logging.getLogger("a library's")
get_logger()  # gives loggers their methods that tell once


class Logging(NanoGPT):
    """Says something between its logits and its loss."""

    def __init__(self, method: str) -> None:
        super().__init__(1)
        self.method = method

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = self.head(self.features(input_ids)).float().double()
        getattr(logger, self.method)("the loss is the default one")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_transformers_model_that_logs_before_its_loss_streams_whole() -> None:
    model = build("gpt2")
    assert model.loss_type is None  # which it warns of before its loss
    model = make_dtype_preserving(model)
    batch = make_batch(BATCH, LENGTH)
    want = run(model, batch)
    counters.clear()
    assert_same_step(run(model, batch, streamed(model, chunk_size=4)), want)
    assert_streamed_whole()
    assert not counters["graph_break"]


@pytest.mark.parametrize("method", ["warning_once", "info_once"])
def test_a_message_told_once_does_not_break_the_graph(method: str) -> None:
    model, batch = Logging(method).double(), make_batch(BATCH, LENGTH)
    counters.clear()
    assert_same_step(run(model, batch, streamed(model, chunk_size=4)), run(model, batch))
    assert_streamed_whole()
    assert not counters["graph_break"]


def test_logits_before_a_graph_break_are_told_of_with_the_call_and_the_remedy() -> None:
    model, batch = Logging("warning").double(), make_batch(BATCH, LENGTH)
    want = run(model, batch)
    with pytest.warns(BarrierWarning) as told:
        got = run(model, batch, streamed(model, chunk_size=4))
    assert_same_step(got, want)
    lines = [line for one in told for line in str(one.message).splitlines()]
    (line,) = [line for line in lines if "leaves the graph whole" in line]
    assert line.strip().startswith("linear: ")
    assert "getattr(logger, self.method)" in line and "ignore_logging_functions" in line
    assert "self.head(" in line


def _barriers(function: Any, *inputs: Any) -> list[list[Barrier]]:
    """Those of each graph of ``function``."""
    found = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(whole_outputs(graph_module))
        return graph_module

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return found


IDS = torch.randint(0, VOCAB, (BATCH, LENGTH))


def test_logits_that_are_returned_without_a_loss_are_told_of_with_their_bytes() -> None:
    ((barrier,),) = _barriers(LogitsOnly(1), IDS)
    assert barrier.bytes == BATCH * LENGTH * VOCAB * 4
    assert "compile the loss together with the model" in barrier.reason


def test_no_output_is_told_of_that_is_narrow_or_needs_no_gradient_or_has_a_loss_beside_it() -> None:
    model = LogitsOnly(1)
    with torch.no_grad():
        assert _barriers(model, IDS) == [[]]
    assert _barriers(model.features, IDS) == [[]]
    assert _barriers(lambda ids: (model(ids), model(ids).sum()), IDS) == [[]]
    assert _barriers(lambda x: x.repeat(1, 1, 5), torch.randn(2, 7, HIDDEN)) == [[]]
    assert _barriers(lambda ids: model(ids).detach(), IDS) == [[]]


def test_what_a_user_has_dynamo_ignore_stays_ignored() -> None:
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.warning}):
        ignore_messages_told_once()
        model, batch = Logging("warning").double(), make_batch(BATCH, LENGTH)
        streamed(model, chunk_size=4)(**batch)
        assert_streamed_whole()

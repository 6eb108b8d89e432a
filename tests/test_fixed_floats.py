"""`fix_floats`: a dynamic graph is compiled once, and is right for other floats too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streambp_fx.backend import streambp
from tests.backend import needs_report, streamed
from tests.models import build, make_batch
from tests.oracle import assert_same_step, run
from tests.own_models import NanoGPT
from tests.watch import count_compiles

CHUNK = 4


@needs_report
@pytest.mark.parametrize("name", ["nanogpt_dropout", "llama", "gpt2_dropout"])
def test_dynamic_graph_is_compiled_once(name: str) -> None:
    model = NanoGPT(1, dropout=0.3) if name == "nanogpt_dropout" else build(name)
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        calls.append(args)
        return streambp(*args, **kwargs)

    torch._dynamo.reset()
    options = {"chunk_size": CHUNK, "compile_bodies": False}
    run(
        model,
        make_batch(2, 10),
        torch.compile(model, backend=counting, dynamic=True, options=options),
    )
    assert len(calls) == 1


def test_other_settings_are_right_though_they_were_constants() -> None:
    torch.manual_seed(0)
    model: Any = NanoGPT(1, dropout=0.3).double()
    batch = make_batch(2, 10)
    function = streamed(model, dynamic=True, chunk_size=CHUNK, lowered=False)
    run(model, batch, function)
    for block in model.blocks:
        block.dropout.p = block.attention.dropout = 0.0
        block.norm_1.eps = 0.5
    assert_same_step(run(model, batch, function), run(model, batch))


def test_float_that_enters_arithmetic_stays_symbolic() -> None:
    torch.manual_seed(0)
    model = NanoGPT(1).double()
    batch = make_batch(2, 10)

    def loss_at(temperature: float) -> Callable[[Callable[..., Any], Any], Tensor]:
        return lambda function, batch: function(**batch, temperature=temperature)

    def program(input_ids: Tensor, labels: Tensor, temperature: float) -> Tensor:
        logits = F.layer_norm(model.features(input_ids), (32,), eps=1e-5) @ model.head.weight.mT
        return F.cross_entropy((logits * temperature).flatten(0, 1), labels.flatten())

    function = streamed(program, dynamic=True, chunk_size=CHUNK)
    run(model, batch, function, loss=loss_at(0.7))
    with count_compiles() as compiles:
        got = run(model, batch, function, loss=loss_at(0.9))
    assert compiles.frames == 0
    assert_same_step(got, run(model, batch, program, loss=loss_at(0.9)))


def test_float_that_is_computed_is_no_constant() -> None:
    weight = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)

    def program(ids: Tensor, kind: Tensor) -> Tensor:
        return F.embedding(ids, weight, norm_type=(kind * 2).item()).square().sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        function = streamed(program, chunk_size=CHUNK)
        for kind in (2.0, 3.0):
            ids, held = torch.arange(9)[None], torch.tensor(kind, dtype=torch.float64)
            torch.testing.assert_close(function(ids, held), program(ids, held))

"""`Report`: what the last compilation streamed, and what it could not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from streambp_fx.backend import BarrierError, BarrierWarning
from streambp_fx.passes.barrier import Barrier
from streambp_fx.passes.pipeline import History
from streambp_fx.report import Report
from tests.backend import last_report, needs_report, streamed

pytestmark = needs_report

X = torch.ones(2, 6, 4)


def _doubled(x: Tensor) -> Tensor:
    return (x * 2).exp()


def _mixed(x: Tensor) -> Tensor:
    return (x * 2).flip(1).exp()


def test_problems_put_the_reason_first() -> None:
    barrier = Barrier("aten.flip.default", "file:3", "the op mixes tokens", 7)
    history = History(barriers=[barrier], unstreamed="why")
    line = "aten.flip.default: the op mixes tokens (file:3)"
    assert Report.of(history).problems() == ["why", line]
    assert Report.of(History(barriers=[barrier])).problems() == [line]
    assert Report.of(History()).problems() == []


def test_report_is_of_its_time() -> None:
    history = History()
    report = Report.of(history)
    history.barriers.append(Barrier("op", "source", "reason"))
    history.seconds["pass"] = 1.0
    assert report.barriers == () and report.seconds == {}


def test_streamed_whole() -> None:
    streamed(_doubled, chunk_size=2)(X)
    report = last_report()
    assert report.problems() == []
    assert [loop.chunk_size for loop in report.loops] == [2]
    assert {"normalize", "find_axes", "choose_cuts", "rewrite"} <= report.seconds.keys()


def test_barrier_names_op_reason_and_source_line() -> None:
    with pytest.warns(BarrierWarning, match=r"prims\.rev.*mixes tokens.*x \* 2\)\.flip\(1\)"):
        streamed(_mixed)(X)
    (barrier,) = last_report().barriers
    assert barrier.bytes == X.numel() * X.element_size()


def test_barrier_raises_where_asked_to() -> None:
    with pytest.raises(Exception, match="mixes tokens") as caught:
        streamed(_mixed, on_barrier="error")(X)
    assert isinstance(caught.value.__cause__ or caught.value, BarrierError) or (
        "BarrierError" in str(caught.value)
    )


def test_barrier_is_silent_where_asked_to() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BarrierWarning)
        streamed(_mixed, on_barrier="ignore")(X)
    assert last_report().problems()


@pytest.mark.parametrize(
    "value, reason",
    [
        (torch.ones(2**18 + 1), "no input has a sequence axis"),
        (torch.ones(6, 257), "no value of the graph carries the sequence axis"),
    ],
)
def test_unstreamed_says_why(value: Tensor, reason: str) -> None:
    with pytest.warns(BarrierWarning, match=reason):
        streamed(lambda x: x * 2)(value)
    assert reason in last_report().unstreamed
    assert last_report().loops == ()


def _table(positions: Tensor) -> Tensor:
    """Angles ``[1, tokens, 8]`` of positions."""
    return (positions[..., None] * torch.ones(8)).cos()


@pytest.mark.parametrize(
    "program, value",
    [
        (lambda x: x * 2, torch.ones(())),
        (lambda x: x * 2, torch.ones(2**18)),
        (lambda x: x * 2, torch.ones(6, 256)),
        (_table, torch.arange(9)[None]),
        (lambda w: w @ w, torch.nn.Parameter(torch.ones(600, 600))),
        (lambda x: x.expand(1000, *x.shape), torch.ones(6, 4)),
    ],
)
def test_a_graph_of_small_values_is_no_problem(program: Any, value: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BarrierWarning)
        streamed(program)(value)
    assert last_report().problems() == [] and last_report().loops == ()
    assert last_report().summary() == "nothing to stream"
    (note,) = last_report().notes
    assert note.startswith("nothing to stream: no ") and note.endswith(", and no value is large")


def test_a_large_value_of_a_small_input_is_a_problem() -> None:
    with pytest.warns(BarrierWarning, match="no value of the graph carries the sequence axis"):
        streamed(lambda x: x.sum() * torch.arange(6 * 257))(torch.ones(6, 4))

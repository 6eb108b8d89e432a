"""`Report`: what the last compilation streamed, and what it could not."""

from __future__ import annotations

import warnings

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
        (torch.ones(()), "no input has a sequence axis"),
        (torch.ones(6, 4), "no value of the graph carries the sequence axis"),
    ],
)
def test_unstreamed_says_why(value: Tensor, reason: str) -> None:
    with pytest.warns(BarrierWarning, match=reason):
        streamed(lambda x: x * 2)(value)
    assert reason in last_report().unstreamed
    assert last_report().loops == ()

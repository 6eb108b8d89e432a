"""`streambp_fx.check`: right steps are right, and what is wrong is seen."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streambp_fx
from streambp_fx import checking
from streambp_fx.checking import FP64_TOLERANCE, Check, NoGradientError, RandomnessError
from streambp_fx.checking_text import MOST_ROWS
from streambp_fx.explaining.loss import NoLossError
from streambp_fx.options import OptionError
from tests.own_models import LogitsOnly, NanoGPT, loss_fn

IDS = torch.arange(100).reshape(2, 50) % 131
OPTIONS = {"chunk_size": 16, "compile_bodies": False}


def check(program: Any, *args: Any, **kwargs: Any) -> Check:
    return streambp_fx.check(program, *args, options=OPTIONS, **kwargs)


@pytest.fixture(scope="module")
def outcome() -> Check:
    return check(NanoGPT(), IDS, IDS)


def test_a_right_step_is_right_for_each_parameter(outcome: Check) -> None:
    assert outcome.right
    assert [row.name for row in outcome.rows] == [n for n, _ in NanoGPT().named_parameters()]
    assert outcome.fp64_tolerance == FP64_TOLERANCE and outcome.narrowest == "float64"
    assert all(row.fp64_apart <= 1e-12 for row in outcome.rows)
    assert all(0 < row.eager_error < 1e-4 for row in outcome.rows)
    assert all(row.apart > row.fp64_apart for row in outcome.rows)


def test_several_chunks_were_tried(outcome: Check) -> None:
    assert outcome.chunks == 4 and outcome.problems == ()


def test_it_prints_a_table_by_parameter_and_a_verdict(
    outcome: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    lines = str(outcome).splitlines()
    assert_a_row_for_each_parameter(lines)
    assert lines[-1].startswith("OK: in fp64, gradients are apart by ")


def test_names_are_whole_where_no_terminal_sets_the_width(
    outcome: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert_a_row_for_each_parameter(str(outcome).splitlines())


def assert_a_row_for_each_parameter(lines: list[str]) -> None:
    assert sum(line.startswith("blocks.") for line in lines) == 24
    assert any(line.split()[:3] == ["blocks.0.up.weight", "128x32", "float32"] for line in lines)


def test_it_is_json(outcome: Check) -> None:
    data = json.loads(json.dumps(outcome.to_dict()))
    assert data["right"] is True and data["chunks"] == 4 and data["unstreamed"] == []
    assert len(data["rows"]) == len(outcome.rows)
    assert data["rows"][0]["fp64_apart"] == outcome.rows[0].fp64_apart


def test_the_program_is_left_as_it_was() -> None:
    model = NanoGPT(layers=1).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert check(model, IDS, IDS).right
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_function_of_models_is_checked() -> None:
    outcome = check(loss_fn, LogitsOnly(layers=1), IDS)
    assert outcome.right and outcome.rows[0].name == "token.weight"


class Rounding(nn.Module):
    """A model that computes in float32 in places, whatever its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.model = NanoGPT(layers=1)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model.head(self.model.features(ids)).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_program_that_rounds_has_a_wider_limit_that_says_why() -> None:
    outcome = check(Rounding(), IDS)
    assert outcome.right and outcome.narrowest == "float32"
    assert FP64_TOLERANCE < outcome.fp64_tolerance < 1e-5
    assert "computes in float32 in places" in " ".join(str(outcome).split())


@pytest.mark.parametrize("way", ["gradient", "own dtype alone", "loss", "missing gradient"])
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    step = checking._step

    def wrong(tree: Any, *streaming: Any) -> tuple[float, dict[str, Tensor | None]]:
        loss, gradients = step(tree, *streaming)
        if not streaming:
            return loss, gradients
        name = "blocks.0.up.bias"
        gradient = gradients[name]
        assert gradient is not None
        narrow = gradient.dtype is torch.float32
        if way == "loss":
            loss *= 1 + 1e-6
        elif way == "missing gradient":
            gradients[name] = None
        elif way == "gradient" or narrow:
            gradient.view(-1)[3] *= 1.01
        return loss, gradients

    monkeypatch.setattr(checking, "_step", wrong)
    outcome = check(NanoGPT(layers=1), IDS, IDS)
    assert not outcome.right
    wrong_rows = [row.name for row in outcome.rows if not row.right]
    assert wrong_rows == ([] if way == "loss" else ["blocks.0.up.bias"])
    assert outcome.loss_right is (way != "loss")
    last = " ".join(str(outcome).split()).rpartition("FAILED: ")[2]
    assert last.startswith("the losses differ" if way == "loss" else "1 gradients are wrong")


def test_a_long_table_has_the_wrong_rows_and_the_farthest(outcome: Check) -> None:
    (row,) = outcome.rows[:1]
    rows = [dataclasses.replace(row, name=f"p{n}.", fp64_apart=n * 1e-16) for n in range(60)]
    rows[0] = dataclasses.replace(rows[0], right=False)
    text = str(dataclasses.replace(outcome, rows=tuple(rows)))
    assert "p0." in text and "p1." not in text and "p59." in text
    assert f"and {60 - MOST_ROWS} more" in text


def test_one_chunk_alone_is_said_to_try_nothing() -> None:
    outcome = streambp_fx.check(
        NanoGPT(layers=1), IDS, IDS, options={"chunk_size": 64, "compile_bodies": False}
    )
    assert outcome.chunks == 1 and "No loop had two chunks" in " ".join(str(outcome).split())


def test_what_can_not_be_checked_is_refused() -> None:
    with pytest.raises(RandomnessError, match=r"draws random numbers \(aten\."):
        check(NanoGPT(layers=1, dropout=0.1), IDS, IDS)
    with pytest.raises(NoLossError):
        check(LogitsOnly(layers=1), IDS)
    with pytest.raises(NoLossError):
        check(NanoGPT(layers=1).requires_grad_(False), IDS, IDS)
    with pytest.raises(NoGradientError):
        check(lambda x: (x**2).mean(), torch.ones(2, 50, 3, requires_grad=True))
    with pytest.raises(OptionError):
        streambp_fx.check(NanoGPT(layers=1), IDS, IDS, options={"chunks": 4})


def test_dropout_that_is_off_draws_nothing() -> None:
    assert check(NanoGPT(layers=1, dropout=0.1).eval(), IDS, IDS).right

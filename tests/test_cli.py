"""The command line: what it prints, and that its exit code tells right from wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import streambp_fx
from streambp_fx import cli, demo
from streambp_fx.commands import demo as command
from streambp_fx.demo import VARIANTS, Demo, DemoConfig, Row
from streambp_fx.measure import Quartiles

RIGHT = {
    variant: Row(variant, 100 * 2**20, Quartiles(0.9, 1.0, 1.1), 2.0, 1e-6) for variant in VARIANTS
} | {"streambp": Row("streambp", 20 * 2**20, Quartiles(0.8, 0.95, 1.0), 9.0, 2e-6)}


def run_demo(
    monkeypatch: pytest.MonkeyPatch, rows: dict[str, Row], *arguments: str
) -> tuple[int, str]:
    """Exit code and output of ``streambp demo`` when its measurements are ``rows``."""

    class Measured:
        def __init__(self, config: DemoConfig, on_progress: Any) -> None:
            on_progress("measuring")

        def rows(self) -> Iterator[Row]:
            yield from rows.values()

    monkeypatch.setattr(command, "Demo", Measured)
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    return result.exit_code, result.stdout


def test_a_right_step_is_ok_and_says_what_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run_demo(monkeypatch, RIGHT)
    assert code == 0
    last = " ".join(output.split("OK: ")[-1].split())
    assert last == (
        "the streamed gradient is exact to 2.0e-06; peak 20.0 MiB, gradient checkpointing 100.0 MiB"
    )


def test_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Row("streambp", 20 * 2**20, Quartiles(1, 1, 1), 9.0, 2e-3)
    code, output = run_demo(monkeypatch, RIGHT | {"streambp": wrong})
    assert code == 1
    assert "FAILED: the streamed gradient is off by 2.0e-03" in output
    assert "OK" not in output


def test_a_failed_step_fails_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Row("streambp", failure="ValueError: no [sequence] axis")
    code, output = run_demo(monkeypatch, RIGHT | {"streambp": failed})
    assert code == 1
    assert 'backend="streambp" failed: ValueError: no [sequence] axis' in " ".join(output.split())


def test_the_table_has_no_box_and_its_meaning_on_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _, output = run_demo(monkeypatch, RIGHT)
    lines = output.splitlines()
    assert lines[0].startswith("One training step: 4 layers") and lines[1].startswith("Peak: bytes")
    (streamed,) = (line for line in lines if line.startswith('backend="streambp" '))
    assert streamed.split()[1:] == ["20.0", "0.95", "(0.80", "to", "1.00)", "9.0", "2.0e-06"]


def test_another_row_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Row("compile", failure="RuntimeError: no C++ compiler")
    code, output = run_demo(monkeypatch, RIGHT | {"compile": failed})
    assert code == 0
    assert "torch.compile failed: RuntimeError: no C++ compiler" in output


def test_json_holds_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = run_demo(monkeypatch, RIGHT, "--json", "--tokens", "128", "--layers", "2")
    report = json.loads(output)
    assert code == 0 and report["ok"] is True
    assert (report["config"]["tokens"], report["config"]["layers"]) == (128, 2)
    assert [row["variant"] for row in report["rows"]] == list(VARIANTS)
    assert report["rows"][3]["time_ratio"] == {"lower": 0.8, "median": 0.95, "upper": 1.0}


def test_without_transformers_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 2
    assert "pip install 'streambp-fx[transformers]'" in result.stderr


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0 and result.stdout.strip() == streambp_fx.__version__


def test_the_help_has_an_example_of_each_command_in_one_order() -> None:
    lines = CliRunner().invoke(cli.app, ["--help"]).stdout.splitlines()
    examples = [line.split()[1] for line in lines if line.split()[:1] == ["streambp"]]
    assert examples == ["demo", "explain", "check", "plan", "bench"]


@pytest.mark.parametrize(("users", "expected"), [(None, cli.LEVEL_OF_NOTHING), ("2", "2")])
def test_the_profiler_is_silent_unless_the_user_asks_it_to_speak(
    monkeypatch: pytest.MonkeyPatch, users: str | None, expected: str
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(cli, "app", lambda: seen.append(os.environ.get("KINETO_LOG_LEVEL")))
    monkeypatch.setenv("KINETO_LOG_LEVEL", users or "")
    if users is None:
        monkeypatch.delenv("KINETO_LOG_LEVEL")
    cli.main()
    assert seen == [expected]


@pytest.mark.parametrize("arguments", [("--tokens", "1"), ("--layers", "0"), ("--rank", "3")])
def test_bad_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(cli.app, ["demo", *arguments]).exit_code == 2


@pytest.mark.parametrize("size", [{"width": 64}, {"tokens": 0}, {"rounds": -1}])
def test_impossible_configs_are_refused(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(size))):
        DemoConfig(**size)


TINY = DemoConfig(tokens=48, layers=2, width=128, vocabulary=64, rounds=2)


def test_eager_and_checkpointing_are_measured_and_a_failure_is_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "VARIANTS", {"eager": "eager", "gc": "gc", "other": "other"})
    said: list[str] = []
    eager, checkpointed, other = Demo(TINY, on_progress=said.append).rows()
    assert eager.right and checkpointed.right
    assert eager.peak is not None and checkpointed.peak is not None
    assert eager.peak > checkpointed.peak > 0
    assert eager.time_ratio is not None and eager.time_ratio.median > 0
    assert other.failure is not None and other.failure.startswith("ValueError: unknown variant")
    assert not other.right
    assert said[0] == "reference: eager in fp64" and "gc: memory" in said


def test_a_model_is_the_same_each_time_and_leaves_the_callers_random_state() -> None:
    def build() -> torch.nn.Module:
        return demo.build_model(layers=1, width=128, vocabulary=32, intermediate=64, heads=2)

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = build()
    assert torch.equal(torch.rand(3), expected)
    for one, two in zip(first.parameters(), build().parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_the_demo_runs() -> None:
    """The whole command, on a sequence that is short and no multiple of a chunk."""
    command = [sys.executable, "-m", "streambp_fx.cli", "demo", "--tokens", "200", "--layers", "1"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert all(row["failure"] is None for row in report["rows"])
    assert "profiler_start" not in done.stderr

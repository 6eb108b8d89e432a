"""``streambp plan``: what it prints, and that its exit code tells what went wrong."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from streambp_fx.planning import Plan, PlanningError, Setting, WayPlan
from streambp_fx.planning.plot import save_plot

command = importlib.import_module("streambp_fx.commands.plan")
app = typer.Typer()
app.command()(command.plan_command)

GIB = 2**30
CURVE = [(1, 10 * GIB), (1000, 20 * GIB)]
FOUND = Plan(
    "Qwen3-8B",
    Setting(),
    36,
    (3, 4),
    8_190_735_360,
    8_190_735_360,
    (
        WayPlan("eager", 0, {"weights": 90 * GIB}, CURVE),
        WayPlan(
            "streambp", 201_099, {"weights": 15 * GIB, "layer inputs": 55 * GIB}, CURVE, 4096, 1024
        ),
    ),
)


def run(monkeypatch: pytest.MonkeyPatch, found: Any, *arguments: str) -> tuple[Result, list[Any]]:
    """The result of ``streambp plan`` when `plan` returns or raises ``found``, and its calls."""
    calls: list[Any] = []

    def planned(model: str, setting: Setting, **options: Any) -> Plan:
        options.pop("on_progress")(0.5, "tracing [it]")
        calls.append((model, setting, options))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(command, "plan", planned)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner().invoke(app, list(arguments)), calls


def test_the_table_has_lengths_chunks_and_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, FOUND, "Qwen3-8B")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "eager does not fit 90.00 - -" in lines
    assert "streambp 201,099 70.00 4096 1024" in lines
    assert "weights 90.000 15.000" in lines
    assert "layer inputs - 55.000" in lines
    assert any("traced at 3 and 4 of 36 layers" in line for line in lines)


def test_json_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, FOUND, "Qwen3-8B", "--json")
    report = json.loads(result.stdout)
    assert report["ways"][1]["longest"] == 201_099
    assert report["ways"][1]["terms"] == {"weights": 15 * GIB, "layer inputs": 55 * GIB}
    assert report["setting"]["objective"] == "sft"


def test_arguments_are_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "Gemma3-1B --memory 24 --reserve 0.5 --dtype fp32 --lora 8 --objective grpo --batch 2 "
        "--group 4 --optimizer adamw --keep-gradients --chunk-size 300 --head-chunk-size 30"
    )
    _, calls = run(monkeypatch, FOUND, *arguments.split())
    setting = Setting(24, 0.5, "fp32", 8, "grpo", 2, 4, "adamw", True)
    assert calls == [("Gemma3-1B", setting, {"chunk_size": 300, "head_chunk_size": 30})]


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("wrong [value]"), 2), (PlanningError("layers are not [alike]"), 1)],
)
def test_an_error_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    result, _ = run(monkeypatch, error, "Qwen3-8B")
    assert result.exit_code == code
    assert str(error) in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--dtype", "int8"], "dtype is one of bf16, fp16, fp32"), (["--memory", "0.5"], "reserve")],
)
def test_a_wrong_setting_is_told(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    result, calls = run(monkeypatch, FOUND, "Qwen3-8B", *arguments)
    assert result.exit_code == 2 and said in result.stderr and not calls


@pytest.mark.parametrize(
    ("missing", "arguments", "code"),
    [
        ("transformers", [], 2),
        ("matplotlib", ["--plot", "x.png"], 2),
        ("matplotlib", [], 0),
    ],
)
def test_what_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, missing: str, arguments: list[str], code: int
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == missing else object())
    result, _ = run(monkeypatch, FOUND, "Qwen3-8B", *arguments)
    assert result.exit_code == code
    assert ("pip install 'streambp-fx[" in result.stderr) == bool(code)


def test_the_picture_has_a_line_for_each_way_and_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "peaks.svg"
    result, _ = run(monkeypatch, FOUND, "Qwen3-8B", "--plot", str(target))
    assert result.exit_code == 0, result.output
    lines = target.read_text().count('id="line2d')
    save_plot(Plan("m", Setting(), 1, (1,), 1, 1, FOUND.ways[:1]), target)
    assert lines == target.read_text().count('id="line2d') + 2  # the line, and that of its legend


def test_a_picture_of_an_unknown_format_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    result, _ = run(monkeypatch, FOUND, "Qwen3-8B", "--plot", str(tmp_path / "peaks.nonsense"))
    assert result.exit_code == 2 and "nonsense" in result.stderr


@pytest.mark.slow
def test_a_config_file_is_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 5, **sizes, **heads}))
    result = CliRunner().invoke(app, [str(file), "--memory", "1.2", "--json"])
    assert result.exit_code == 0, result.output
    ways = {way["way"]: way for way in json.loads(result.stdout)["ways"]}
    assert 1000 < ways["eager"]["longest"] < ways["streambp"]["longest"]
    assert ways["streambp"]["chunk_size"] >= 256


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    result = CliRunner().invoke(app, ["Qwen9-1B"])
    assert result.exit_code == 2 and "Llama-3.1-8B" in result.stderr
    assert "building the model" not in result.output

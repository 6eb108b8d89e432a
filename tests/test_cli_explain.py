"""``streambp explain`` and ``streambp check``: what they print and write, and their exit codes."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from streambp_fx import checking
from streambp_fx.cli import app
from streambp_fx.commands import explain as command
from streambp_fx.commands import program
from streambp_fx.passes.barrier import Barrier


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config.json of a small model."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("config")
    Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return str(folder)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


SMALL = (
    *("--tokens", 50, "--batch", 2, "--chunk-size", 16, "--layers", 1),
    "--no-compile-bodies",
)


def test_explain_prints_the_report_and_writes_what_it_is_asked_for(
    config: str, tmp_path: Path
) -> None:
    html, plot, graphs = tmp_path / "a.html", tmp_path / "a.png", tmp_path / "graphs"
    files = ("--html", html, "--plot", plot, "--graphs", graphs)
    result = run("explain", config, *SMALL, "--compare", "eager,checkpointing", *files)
    assert result.exit_code == 0, result.output
    for words in ("Qwen3ForCausalLM(input_ids int64[2, 50]", "Barriers: none", "eager"):
        assert words in result.stdout
    assert "torch.compile" not in result.stdout
    assert f"files into {graphs}" in " ".join(result.stdout.split()).replace("\n", "")
    assert html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert plot.read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in graphs.iterdir()}
    assert {"captured.txt", "chain.py", "segment0.rewritten.py", "segment1.backward.py"} <= names
    compile((graphs / "segment1.rewritten.py").read_text(encoding="utf-8"), "rewritten.py", "exec")


def test_explain_gives_json(config: str) -> None:
    result = run("explain", config, *SMALL, "--compare", "none", "--dtype", "fp32", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["peers"] == {} and data["written"] == [] and data["peak"]["bytes"] > 0
    loops = data["graphs"][0]["loops"]
    assert {loop["chunks"] for loop in loops} == {4}
    weights = {o["dtype"] for loop in loops for o in loop["operands"] if o["how"] == "whole"}
    assert "float32" in weights and "bfloat16" not in weights


def test_explain_exits_with_1_where_something_is_left(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain = command.explain

    def with_barrier(*args: Any, **kwargs: Any) -> Any:
        found = explain(*args, **kwargs)
        barrier = Barrier("aten.sort.default", "line", "the op mixes tokens", 100)
        capture = dataclasses.replace(found.captures[0], barriers=(barrier,))
        return dataclasses.replace(found, captures=(capture,))

    monkeypatch.setattr(command, "explain", with_barrier)
    result = run("explain", config, *SMALL, "--compare", "none")
    assert result.exit_code == 1 and "aten.sort.default" in result.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("no/such/config",), "neither the path"),
        (("CONFIG", "--dtype", "int8"), "--dtype is one of"),
        (("CONFIG", "--compare", "eager,magic"), "--compare has magic"),
        (("CONFIG", "--triton", "kernels", "--target", "abacus"), "no GPU target 'abacus'"),
        (("CONFIG", "--tokens", "1"), "--tokens"),
        (("CONFIG", "--html", "no/such/folder/page.html", "--compare", "none"), "no/such/folder"),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_what_is_accepted(
    config: str, arguments: tuple[str, ...], words: str
) -> None:
    given = [config if argument == "CONFIG" else argument for argument in arguments]
    result = run("explain", *given)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["explain", "check"])
def test_without_transformers_it_says_what_to_install(
    name: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "find_spec", lambda module: None)
    result = run(name, config)
    assert result.exit_code == 2
    assert "pip install 'streambp-fx[transformers]'" in result.stderr


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_explain_writes_triton_sources(config: str, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    result = run(
        *("explain", config, *SMALL, "--compare", "none"),
        *("--target", "a100", "--triton", folder),
    )
    assert result.exit_code == 0, result.output
    kernels = [path for path in folder.glob("*.py") if "@triton.jit" in path.read_text()]
    assert kernels and (folder / "segment1.py").exists()


def test_check_says_that_a_step_is_right(config: str) -> None:
    arguments = ("--tokens", 50, "--layers", 1, "--no-compile-bodies")
    result = run("check", config, *arguments, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["right"] is True and data["chunks"] == 3
    assert "lm_head.weight" in {row["name"] for row in data["rows"]}


def test_check_exits_with_1_where_a_gradient_is_wrong(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "ROUNDINGS", 0)  # nothing is then right
    result = run("check", config, "--tokens", 50, "--layers", 1, "--no-compile-bodies")
    assert result.exit_code == 1 and "FAILED" in result.stdout


@pytest.mark.parametrize("name", ["demo", "explain", "check", "plan", "bench"])
def test_help_teaches(name: str) -> None:
    text = " ".join(run(name, "--help").stdout.split())
    assert f"streambp {name} " in text and "Exits with 0" in text and "with 2 if" in text

"""``streambp bench``: every way at every length, failures as rows, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from typer.testing import CliRunner

from streambp_fx import cli
from streambp_fx.commands import bench as command


@pytest.fixture(autouse=True)
def _fresh_compilations() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def config(tmp_path: Path) -> str:
    tiny = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    tiny.architectures = ["Qwen3ForCausalLM"]
    tiny.save_pretrained(tmp_path)
    return str(tmp_path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    return result.exit_code, result.stdout


def ways(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--way", name)]


def test_each_way_is_measured_at_each_length(config: str, tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    lengths = ["--tokens", "17", "--tokens", "200", "--rounds", "2"]
    code, output = run(config, *ways("eager", "gc"), *lengths, "--json", "--output", str(written))
    assert code == 0
    report = json.loads(output)
    assert report == json.loads(written.read_text())
    assert (report["layers"], report["dtype"], report["batch"]) == (2, "fp32", 1)
    rows = {(row["way"], row["tokens"]): row for row in report["measurements"]}
    assert list(rows) == [("eager", 17), ("eager", 200), ("gc", 17), ("gc", 200)]
    assert all(row["seconds"]["median"] > 0 and row["first"] > 0 for row in rows.values())
    assert rows["eager", 200]["peak"] > rows["eager", 17]["peak"] > 0
    assert rows["gc", 200]["peak"] < rows["eager", 200]["peak"]


def failing(way: str, call: Callable[..., Any]) -> Callable[[Any, str], Any]:
    """`prepare` whose ``way`` runs out of memory from 100 tokens on."""

    def limited(input_ids: torch.Tensor, **inputs: Any) -> Any:
        if input_ids.shape[1] >= 100:
            raise torch.OutOfMemoryError("needed more")
        return call(input_ids=input_ids, **inputs)

    return lambda model, name: limited if name == way else model


@pytest.mark.parametrize(("way", "expected"), [("gc", 0), ("streambp", 1)])
def test_a_failure_is_a_row_and_only_the_streamed_steps_fails_the_command(
    config: str, monkeypatch: pytest.MonkeyPatch, way: str, expected: int
) -> None:
    models: list[Any] = []
    real = command.model_with_random_weights

    def remembered(*arguments: Any) -> Any:
        models.append(real(*arguments))
        return models[-1]

    monkeypatch.setattr(command, "model_with_random_weights", remembered)
    monkeypatch.setattr(command, "prepare", failing(way, lambda **inputs: models[-1](**inputs)))
    lengths = ["--tokens", "200", "--tokens", "17", "--rounds", "1"]
    code, output = run(config, *ways(way, "eager"), *lengths, "--layers", "1", "--batch", "2")
    assert code == expected
    assert ": 1 layers, fp32, 2 rows" in " ".join(output.split())
    lines = [line for line in output.splitlines() if " 17 " in line or " 200 " in line]
    assert ["failed" in line for line in lines] == [True, False, False, False]


def test_the_help_says_what_is_measured_by_default() -> None:
    text = " ".join(CliRunner().invoke(cli.app, ["bench", "--help"]).stdout.split())
    assert "1024, 2048, 4096" in text and "(all)" in text


@pytest.mark.parametrize(
    "arguments", [("--way", "other"), ("--dtype", "fp8"), ("--tokens", "1"), ("--rounds", "0")]
)
def test_bad_arguments_are_refused(config: str, arguments: tuple[str, str]) -> None:
    assert run(config, *arguments)[0] == 2


def test_without_a_gpu_the_command_says_so(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(config, "--device", "cuda")[0] == 2

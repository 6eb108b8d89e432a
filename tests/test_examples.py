"""The examples do what they say, as a user would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_sft_learns_what_eager_learns() -> None:
    arguments = ("--tokens", "193", "--steps", "8")
    streamed, eager = (
        [float(value) for value in re.findall(r"\d+\.\d+", run_example("train_sft.py", *more))]
        for more in (arguments, (*arguments, "--backend", "eager"))
    )
    assert streamed == pytest.approx(eager, abs=2e-3)
    assert streamed[-1] < streamed[0] - 0.1


@pytest.mark.slow
def test_custom_module_has_eagers_gradients() -> None:
    output = run_example("custom_module.py", "--tokens", "300")
    assert float(output.split()[-1]) < 1e-10

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


def numbers(name: str, *arguments: str) -> list[float]:
    """The first and last value of each quantity that an example prints at its end."""
    lines = run_example(name, *arguments).splitlines()
    printed = [line for line in lines if "at the first step" in line]
    return [float(value) for line in printed for value in re.findall(r"-?\d+\.\d+", line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, steps",
    # Adapters start at zero, and learn slowly at first.
    [("plain_loop.py", 4), ("sft.py", 4), ("dpo.py", 4), ("lora.py", 16)],
)
def test_trainer_learns_what_it_learns_unstreamed(name: str, steps: int) -> None:
    arguments = ("--tokens", "96", "--steps", str(steps))
    streamed = numbers(name, *arguments)
    assert streamed == pytest.approx(numbers(name, *arguments, "--plain"), abs=2e-3)
    assert streamed[-1] < streamed[0] - 0.01


@pytest.mark.slow
def test_policy_is_the_one_that_is_trained_unstreamed() -> None:
    arguments = ("--tokens", "32", "--steps", "3")
    streamed = numbers("grpo.py", *arguments)
    assert streamed == pytest.approx(numbers("grpo.py", *arguments, "--plain"), abs=2e-3)
    assert len(set(streamed)) == len(streamed) == 4


@pytest.mark.slow
def test_custom_module_has_eagers_gradients() -> None:
    output = run_example("custom_module.py", "--tokens", "300")
    assert float(output.split()[-1]) < 1e-10

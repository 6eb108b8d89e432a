"""TRL's own trainers with one more line: the same numbers in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streambp_fx.integrations import trl as integration
from tests.trainers import (
    OPTIONS,
    Run,
    arguments,
    assert_less_memory,
    assert_nothing_compiled_late,
    assert_same_history,
    assert_same_weights,
    lengths,
    tiny_model,
    tokenizer,
    train,
    words,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def _stream(trainer: Any) -> Any:
    torch._dynamo.reset()
    integration.stream(trainer, options=OPTIONS)
    return trainer


def _texts(count: int = 24) -> Any:
    return datasets.Dataset.from_list(
        [{"text": words(length, seed)} for seed, length in enumerate(lengths(count))]
    )


def _sft(folder: Path, model: Any = None, **changes: Any) -> Any:
    return trl.SFTTrainer(
        model or tiny_model(),
        args=trl.SFTConfig(**arguments(folder, **changes)),
        train_dataset=_texts(),
        processing_class=tokenizer(),
    )


def _compare(make: Any, *names: str, tolerance: float = 1e-5) -> tuple[Run, Run]:
    want = train(make())
    got = train(_stream(make()))
    assert_same_history(got, want, *names, tolerance=tolerance)
    assert_same_weights(got.weights, want.weights, 1e-3)
    assert_nothing_compiled_late(got)
    return got, want


def test_sft(tmp_path: Path) -> None:
    got, want = _compare(lambda: _sft(tmp_path), "entropy", "mean_token_accuracy")
    assert_less_memory(got, want)


def _preferences(count: int = 24) -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(4, seed),
                "chosen": " " + words(length, seed + 100),
                "rejected": " " + words(length // 2 + 2, seed + 200),
            }
            for seed, length in enumerate(lengths(count))
        ]
    )


def _dpo(folder: Path, **changes: Any) -> Any:
    return trl.DPOTrainer(
        tiny_model(),
        ref_model=tiny_model(),
        args=trl.DPOConfig(**arguments(folder, **changes)),
        train_dataset=_preferences(),
        processing_class=tokenizer(),
    )


def test_dpo(tmp_path: Path) -> None:
    got, want = _compare(
        lambda: _dpo(tmp_path), "rewards/margins", "logps/chosen", "logits/chosen", tolerance=1e-4
    )
    assert_less_memory(got, want)


def _prompts(count: int = 24) -> Any:
    return datasets.Dataset.from_list(
        [{"prompt": words(length, seed)} for seed, length in enumerate(lengths(count))]
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    """The share of even words."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split()) / max(len(text.split()), 1)
        for text in completions
    ]


def _grpo(folder: Path, **changes: Any) -> Any:
    return trl.GRPOTrainer(
        tiny_model(),
        reward_funcs=_reward,
        args=trl.GRPOConfig(
            **arguments(folder, num_generations=2, max_completion_length=12, beta=0.0, **changes)
        ),
        train_dataset=_prompts(),
        processing_class=tokenizer(),
    )


def test_grpo(tmp_path: Path) -> None:
    got, want = _compare(lambda: _grpo(tmp_path), "reward", "entropy")
    assert_less_memory(got, want)

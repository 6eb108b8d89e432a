"""Tiny data, models and trainers in memory, and what a training run did.

Lengths are mixed, and the first two batches differ in length: what a run compiles after its second
batch it would compile again and again. Loop bodies run eagerly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streambp_fx.measure import peak_memory
from tests.models import VOCAB, from_transformers, llama_settings
from tests.watch import Compiles, assert_no_allocation_of, count_compiles

OPTIONS: dict[str, Any] = {
    "chunk_size": 8,
    "head_chunk_size": 8,
    "compile_bodies": False,
    "on_barrier": "error",
}

STEPS = 5
ACCUMULATION = 2
WARM_UP = 2
"""Batches that may compile: the first, and the first of another length."""

ROUNDING = 1e-5

ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": ACCUMULATION,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""What every trainer's arguments are built from."""


def tiny_model(**changes: Any) -> Any:
    """A one-layer Qwen3 with `VOCAB` tokens, float32, weights from a fixed seed."""
    torch.manual_seed(0)
    settings = {"head_dim": 8, "num_hidden_layers": 1, **changes}
    return from_transformers("Qwen3", llama_settings(**settings))


def tokenizer() -> Any:
    """Words ``w3`` to ``w130`` and three special tokens, each its own id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    model = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
    )


def lengths(count: int, *, shortest: int = 12, longest: int = 30, seed: int = 0) -> list[int]:
    """Mixed lengths."""
    draw = random.Random(seed)
    return [draw.randint(shortest, longest) for _ in range(count)]


def words(length: int, seed: int) -> str:
    """A text of ``length`` random words."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(3, VOCAB)}" for _ in range(length))


def token_rows(count: int = 20) -> list[dict[str, list[int]]]:
    """Rows of ``input_ids`` of mixed lengths."""
    return [
        {"input_ids": [int(word[1:]) for word in words(length, seed).split()]}
        for seed, length in enumerate(lengths(count))
    ]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows padded on the right to the longest, with labels and an attention mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[index, : len(row["input_ids"])] = 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


@dataclass
class Run:
    """What one training run did.

    history
        Each logged step's numbers.
    late
        What was compiled after the first `WARM_UP` batches.
    weights
        The trained parameters by name.
    micro_step
        Runs the forward and backward of the last batch again.
    tokens
        The number of token positions in that batch, padding included.
    """

    history: list[dict[str, float]]
    late: Compiles
    weights: dict[str, Tensor]
    micro_step: Callable[[], None]
    tokens: int


def train(trainer: Any) -> Run:
    """Run ``trainer.train()`` and watch it."""
    compute_loss = trainer.compute_loss
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    late = Compiles()
    with ExitStack() as stack:

        def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal late
            calls.append(((model, dict(inputs), *args), kwargs))
            if len(calls) == WARM_UP + 1:
                late = stack.enter_context(count_compiles())
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = watched
        torch.manual_seed(0)
        trainer.train()
        trainer.compute_loss = compute_loss
    assert len(calls) == STEPS * ACCUMULATION, len(calls)
    model = trainer.accelerator.unwrap_model(trainer.model)

    def micro_step() -> None:
        (model, inputs, *args), kwargs = calls[-1]
        compute_loss(model, dict(inputs), *args, **kwargs).backward()
        model.zero_grad(set_to_none=True)

    history = [
        {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        for row in trainer.state.log_history
        if "loss" in row
    ]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    last = calls[-1][0][1]
    ids = [last[name] for name in ("input_ids", "prompt_ids", "completion_ids") if name in last]
    return Run(history, late, weights, micro_step, sum(part.numel() for part in ids))


def assert_same_history(got: Run, want: Run, *names: str, tolerance: float = ROUNDING) -> None:
    """Fail unless loss, gradient norm and the metrics ``names`` agree at every step."""
    for index, (left, right) in enumerate(zip(got.history, want.history, strict=True)):
        for name in ("loss", "grad_norm", *names):
            assert left[name] == pytest.approx(right[name], rel=tolerance, abs=tolerance), (
                f"step {index + 1}, {name}: {left[name]}, uncompiled {right[name]}"
            )
    moved = {row["loss"] for row in want.history}
    assert len(want.history) == STEPS and len(moved) == STEPS, "the run does not train"


def assert_nothing_compiled_late(run: Run) -> None:
    """Fail if something was compiled after the first `WARM_UP` batches."""
    assert run.late == Compiles(0, 0), run.late


def assert_same_weights(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 1e-4
) -> None:
    """Fail unless the trained weights have the same names and agree."""
    assert got.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=tolerance, atol=tolerance, msg=name)


def assert_less_memory(run: Run, uncompiled: Run, itemsize: int = 4) -> None:
    """Fail unless a streamed micro-step peaks lower, and never holds logits of all its tokens."""
    ours, theirs = peak_memory(run.micro_step), peak_memory(uncompiled.micro_step)
    assert ours < theirs, f"{ours} bytes streamed, {theirs} uncompiled"
    assert_no_allocation_of(run.micro_step, run.tokens * VOCAB * itemsize)


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """`ARGUMENTS` with an output folder and ``changes``."""
    return {**ARGUMENTS, "output_dir": str(folder), **changes}

"""What stands in for your model, tokenizer and data in the examples; nothing is downloaded.

Replace `model` by ``AutoModelForCausalLM.from_pretrained(...)``, `tokenizer` by
``AutoTokenizer.from_pretrained(...)`` and `count_up` by your own texts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

NUMBERS = 500
SPECIAL = ("<pad>", "<bos>", "<eos>")


def model() -> Any:
    """A Qwen3 of two layers with random weights, the same at each call."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=NUMBERS + len(SPECIAL),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each number below `NUMBERS`."""
    words = {word: i for i, word in enumerate((*SPECIAL, *map(str, range(NUMBERS))))}
    split = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def count_up(start: int, length: int, step: int = 1) -> str:
    """A text for a model to learn: numbers in order."""
    return " ".join(str((start + step * i) % NUMBERS) for i in range(length))


def arguments(doc: str | None, *, tokens: int, steps: int) -> argparse.Namespace:
    """``--tokens``, ``--steps`` and ``--plain`` of an example's command line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--tokens", type=int, default=tokens, help="length of the longest text")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--plain", action="store_true", help="do not stream")
    return parser.parse_args()


def training(steps: int) -> dict[str, Any]:
    """Arguments of a trainer that trains on the CPU and leaves no files."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 0,
    }


def report(log: Sequence[dict[str, Any]], name: str = "loss") -> None:
    """Print the first and the last value of ``name`` in a trainer's log."""
    values = [float(row[name]) for row in log if name in row]
    print(f"{name} {values[0]:.4f} at the first step, {values[-1]:.4f} at step {len(values)}")

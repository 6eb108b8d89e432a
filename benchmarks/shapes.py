"""Shapes of models, and models of them with random weights, made on the device and in the dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """A Qwen3; its defaults are those of Qwen3-4B, whose head is tied to its embedding."""

    layers: int = 36
    width: int = 2560
    intermediate: int = 9728
    heads: int = 32
    key_heads: int = 8
    head_size: int = 128
    vocabulary: int = 151936
    tied: bool = True


def build(shape: Shape, dtype: torch.dtype, device: str) -> nn.Module:
    """The same arguments give the same weights. The model trains; its dropout is 0."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        max_position_embeddings=2**20,
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=dtype
        )
    trained: nn.Module = model.train()
    return trained


def random_tokens(shape: Shape, rows: int, tokens: int, device: str) -> torch.Tensor:
    """Token ids, int64, ``[rows, tokens]``, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocabulary, (rows, tokens), generator=generator).to(device)

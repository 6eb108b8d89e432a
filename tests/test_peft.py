"""LoRA and frozen weights under transformers' Trainer: one line, and only what trains is summed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.test_trainers import compiled_in_place, make_trainer
from tests.trainers import (
    Run,
    assert_less_memory,
    assert_nothing_compiled_late,
    assert_same_history,
    assert_same_weights,
    tiny_model,
    train,
)

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "v_proj", "up_proj", "lm_head"]


def lora_model(dropout: float = 0.0) -> Any:
    """`tiny_model` with adapters, those of the head among them; the rest is frozen."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=dropout, target_modules=TARGETS
    )
    model = peft.get_peft_model(tiny_model(tie_word_embeddings=False), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # zero at first, which hides faults of the other factor
            torch.nn.init.normal_(weight, std=0.1)
    return model.train()


def test_lora_on_the_head_too(tmp_path: Path) -> None:
    want = train(make_trainer(tmp_path, lora_model()))
    got = train(make_trainer(tmp_path, compiled_in_place(lora_model())))
    assert_same_history(got, want)
    assert_same_weights(got.weights, want.weights)
    assert_nothing_compiled_late(got)
    assert_less_memory(got, want)


def with_dropout(folder: Path, chunk_size: int) -> Run:
    model = compiled_in_place(lora_model(0.3), chunk_size=chunk_size, head_chunk_size=chunk_size)
    return train(make_trainer(folder, model))


@pytest.mark.slow
def test_lora_with_dropout_does_not_depend_on_chunks(tmp_path: Path) -> None:
    """Eager draws other masks; the same seed gives the same ones for every chunking."""
    chunked, whole = with_dropout(tmp_path, 8), with_dropout(tmp_path, 64)
    assert_same_history(chunked, whole)
    assert_same_weights(chunked.weights, whole.weights)
    assert_nothing_compiled_late(chunked)
    without = train(make_trainer(tmp_path, lora_model()))
    assert chunked.history[0]["loss"] != pytest.approx(without.history[0]["loss"], rel=1e-3)
    assert chunked.history[0]["loss"] == pytest.approx(without.history[0]["loss"], rel=0.2)


def partly_frozen() -> Any:
    """A model whose embedding and attention stay as they are."""
    model = tiny_model(tie_word_embeddings=False)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].self_attn.requires_grad_(False)
    return model


def test_frozen_base(tmp_path: Path) -> None:
    want = train(make_trainer(tmp_path, partly_frozen()))
    got = train(make_trainer(tmp_path, compiled_in_place(partly_frozen())))
    assert_same_history(got, want)
    assert_same_weights(got.weights, want.weights)
    assert_nothing_compiled_late(got)
    assert_less_memory(got, want)
    for name, weight in partly_frozen().named_parameters():
        assert torch.equal(got.weights[name], weight) != weight.requires_grad, name


def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    """The file of a compiled model has the keys of a plain one's, and loads into one."""
    model = compiled_in_place(lora_model())
    model.save_pretrained(tmp_path / "compiled")
    lora_model().save_pretrained(tmp_path / "plain")
    names = [
        load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("compiled", "plain")
    ]
    assert names[0].keys() == names[1].keys()
    loaded = peft.PeftModel.from_pretrained(
        tiny_model(tie_word_embeddings=False), tmp_path / "compiled"
    )
    assert_same_weights(
        {name: weight for name, weight in loaded.named_parameters() if "lora" in name},
        {name: weight for name, weight in model.named_parameters() if "lora" in name},
        0,
    )

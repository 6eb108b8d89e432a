"""Compiling changes nothing about how weights are named, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.backend import streamed
from tests.models import build, make_batch
from tests.oracle import assert_same_step, run

CHUNK = 8
PREFIX = "_orig_mod."


def _trained() -> tuple[Any, Any]:
    """A model after one streamed step, and its compiled module."""
    model = build("llama")
    function = streamed(model, chunk_size=CHUNK)
    function(**make_batch(1, 21)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, function


def test_names_of_weights_get_an_unknown_prefix() -> None:
    """`torch.compile(module)` puts ``_orig_mod.`` before each name, and nothing else."""
    plain = build("llama").state_dict().keys()
    model, function = _trained()
    assert model.state_dict().keys() == plain
    assert [key.removeprefix(PREFIX) for key in function.state_dict()] == list(plain)


def test_compiling_in_place_keeps_names() -> None:
    model = build("nanogpt")
    names = list(model.state_dict())
    model.forward = streamed(model.forward, chunk_size=CHUNK)
    run(model, make_batch(1, 21))
    assert list(model.state_dict()) == names
    build("nanogpt", seed=1).load_state_dict(model.state_dict(), strict=True)


def test_compiled_weights_do_not_load_into_the_plain_model() -> None:
    model, function = _trained()
    fresh = build("llama", seed=7)
    state = {key.removeprefix(PREFIX): value for key, value in function.state_dict().items()}
    fresh.load_state_dict(state, strict=True)
    batch = make_batch(2, 21)
    assert_same_step(run(fresh, batch), run(model, batch), 0)


def test_weights_loaded_after_compilation_are_not_used() -> None:
    model = build("nanogpt").double()
    other = build("nanogpt", seed=7).double()
    batch = make_batch(2, 21)
    function = streamed(model, chunk_size=CHUNK)
    run(model, batch, function)
    model.load_state_dict(other.state_dict(), strict=True)
    assert_same_step(run(model, batch, function), run(other, batch))


def test_saved_model_reloads_with_other_weights(tmp_path: Path) -> None:
    model, _ = _trained()
    model.save_pretrained(tmp_path)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    loaded, info = load(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_compiled_module_inside_a_wrapper_reloads_strictly(tmp_path: Path) -> None:
    def wrapped(seed: int) -> nn.Module:
        return nn.ModuleDict({"inner": streamed(build("nanogpt", seed=seed), chunk_size=CHUNK)})

    first, second = wrapped(0), wrapped(1)
    torch.save(first.state_dict(), tmp_path / "weights.pt")
    second.load_state_dict(torch.load(tmp_path / "weights.pt"), strict=True)
    for name, weight in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight), name

"""`parse_options`: what the backend accepts, and what it says of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streambp_fx.options import OWN_NAMES, OptionError, Options, parse_options


def test_defaults() -> None:
    assert parse_options(None) == parse_options({}) == Options()


@pytest.mark.parametrize(
    "name, value",
    [
        ("chunk_size", 1),
        ("chunk_size", None),
        ("head_chunk_size", 64),
        ("accumulation_dtype", torch.float64),
        ("accumulation_dtype", None),
        ("on_barrier", "error"),
        ("keep_outputs", True),
        ("compile_bodies", False),
    ],
)
def test_accepted(name: str, value: Any) -> None:
    assert getattr(parse_options({name: value}), name) == value


@pytest.mark.parametrize(
    "name, value",
    [
        ("chunk_size", 0),
        ("chunk_size", True),
        ("chunk_size", 2.0),
        ("head_chunk_size", "64"),
        ("accumulation_dtype", torch.bfloat16),
        ("accumulation_dtype", "float32"),
        ("on_barrier", "raise"),
        ("keep_outputs", 1),
        ("compile_bodies", None),
    ],
)
def test_refused_with_the_option_and_what_is_accepted(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"option {name}=.*: expected "):
        parse_options({name: value})


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="'chunk_sise'") as caught:
        parse_options({"chunk_sise": 8})
    assert all(name in str(caught.value) for name in OWN_NAMES)


@pytest.mark.parametrize("name, value", [("max_autotune", "x"), ("triton.cudagraphs", True)])
def test_inductor_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"option {name}=.*: expected "):
        parse_options({name: value})


def test_a_name_that_is_no_string_is_unknown() -> None:
    with pytest.raises(OptionError, match="unknown option 3"):
        parse_options({3: 4})  # type: ignore[dict-item]


def test_inductor_options_are_passed_on() -> None:
    options = parse_options({"max_autotune": True, "triton.unique-kernel-names": False})
    assert options.inductor == {"max_autotune": True, "triton.unique_kernel_names": False}


def test_mode_sets_inductor_options_without_cuda_graphs() -> None:
    options = parse_options({}, "max-autotune")
    assert options.inductor["max_autotune"] is True
    assert "triton.cudagraphs" not in options.inductor
    assert parse_options({}, "default") == Options()


def test_option_wins_over_mode() -> None:
    assert parse_options({"max_autotune": False}, "max-autotune").inductor["max_autotune"] is False


def test_refused_mode() -> None:
    with pytest.raises(OptionError, match=r"reduce-overhead.*accepted are default"):
        parse_options({}, "reduce-overhead")

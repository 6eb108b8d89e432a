"""Configurations, and models without data that have fewer layers than theirs.

Given:  a name of a bundled configuration, or the path of a transformers ``config.json``
Result: the same architecture with any number of layers, on the meta device
"""

from __future__ import annotations

import copy
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

FEWEST_LAYERS = 3
"""A first, a last and one between: the others repeat the middle."""

_CONFIGS = files(__package__) / "configs"
BUNDLED = tuple(sorted(entry.name.removesuffix(".json") for entry in _CONFIGS.iterdir()))


class ConfigError(ValueError):
    """There is no such configuration, or it is not that of a causal language model."""


def load_config(model: str) -> Any:
    """The transformers configuration ``model``, of the language model if it has several parts.

    Args:
        model: one of `BUNDLED`, without regard to case, or the path of a ``config.json`` or of the
            folder that holds one.

    Raises:
        ConfigError: see there.
        ImportError: transformers is not installed.
    """
    from transformers import AutoConfig

    bundled = {name.lower(): name for name in BUNDLED}.get(model.lower())
    path = str(_CONFIGS / f"{bundled}.json") if bundled else model
    if not bundled and not Path(path).exists():
        raise ConfigError(
            f"{model!r} is neither the path of a config.json nor a bundled configuration: "
            f"{', '.join(BUNDLED)}"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no configuration of a text model: {error}") from error
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise ConfigError(f"{path} does not say how many layers there are (num_hidden_layers)")
    return config


def period(config: Any) -> int:
    """After how many layers their kinds repeat: the smallest ``p`` with kinds ``i`` and ``i + p``
    equal for all ``i``, by every list of the configuration that has an entry for each layer."""
    count = config.num_hidden_layers
    kinds = list(zip(*_per_layer(config).values(), strict=True)) or [()] * count
    return next(p for p in range(1, count + 1) if kinds[p:] == kinds[: count - p])


def layer_counts(config: Any) -> tuple[int, ...]:
    """Numbers of layers at which the whole model's memory can be told: two, a period apart and in
    step with the whole; or the whole alone where it has no more layers than those."""
    count, step = config.num_hidden_layers, period(config)
    fewest = max(FEWEST_LAYERS, step)
    first = fewest + (count - fewest) % step
    return (first, first + step) if first + step < count else (count,)


def with_layers(config: Any, count: int) -> Any:
    """``config`` with its first ``count`` layers."""
    shorter = copy.deepcopy(config)
    for name, values in _per_layer(config).items():
        setattr(shorter, name, type(values)(values[:count]))
    shorter.num_hidden_layers = count
    return shorter


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The causal language model of ``config``, on the meta device, in training mode.

    Raises:
        ConfigError: transformers has no causal language model for it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return nn.Module.train(model)


def _per_layer(config: Any) -> dict[str, Any]:
    """The lists of ``config`` with one entry for each layer, by name."""
    return {
        name: values
        for name, values in vars(config).items()
        if isinstance(values, (list, tuple)) and len(values) == config.num_hidden_layers
    }

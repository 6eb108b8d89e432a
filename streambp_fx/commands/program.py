"""What commands have in common that work on the model of a transformers configuration."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch import nn

from ..planning.models import BUNDLED, ConfigError, build, load_config, with_layers
from ..planning.setting import DTYPES

Config = Annotated[
    str,
    typer.Argument(
        help="A transformers config.json, the folder that holds one, or one of "
        f"{', '.join(BUNDLED)}."
    ),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Take only so many of the model's layers.")]
ChunkSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens of a row that a loop takes at once: of the layers and, without "
        "--head-chunk-size, of the head too.",
    ),
]
HeadChunkSize = Annotated[
    int | None, typer.Option(min=1, help="The same for the loop of the head and the loss alone.")
]
CompileBodies = Annotated[
    bool,
    typer.Option(
        help="Loop bodies compiled by Inductor, as in training, or op by op: faster to start, "
        "slower to run."
    ),
]
DType = Annotated[
    str, typer.Option(help=f"Of weights and activations: one of {', '.join(DTYPES)}.")
]


def check_folder(*paths: Path | None) -> None:
    """Ask, before anything takes time, that each file can be written into its folder.

    Raises:
        typer.Exit: one has none; code 2.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise fail(f"there is no folder {path.parent} to write {path.name} into")


def fail(message: str) -> typer.Exit:
    """Say what is wrong with the arguments, on the standard error; the exit to raise: code 2."""
    Console(stderr=True).print(escape(message), style="red", highlight=False)
    return typer.Exit(2)


def need(module: str, extra: str) -> None:
    """Exit with 2, and say what to install, where ``module`` is missing."""
    if find_spec(module) is None:
        raise fail(f"This needs: pip install 'streambp-fx[{extra}]'")


def dtype_of(name: str) -> torch.dtype:
    """The dtype called ``name``; exits with 2 where there is none."""
    if name not in DTYPES:
        raise fail(f"--dtype is one of {', '.join(DTYPES)}, not {name}")
    return DTYPES[name]


def read_config(config: str, layers: int | None) -> Any:
    """The configuration, with fewer layers if ``layers`` says so; exits with 2 where it is none."""
    need("transformers", "transformers")
    try:
        loaded = load_config(config)
    except ConfigError as error:
        raise fail(str(error)) from error
    return loaded if layers is None else with_layers(loaded, min(layers, loaded.num_hidden_layers))


def model_without_data(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device; exits with 2 where transformers has none."""
    try:
        return build(config, dtype)
    except ConfigError as error:
        raise fail(str(error)) from error


def model_with_random_weights(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU with the same weights at each call, dropout switched off."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            raise fail(str(error).splitlines()[0]) from error
    return model.eval()


def backend_options(
    chunk_size: int | None, head_chunk_size: int | None, compile_bodies: bool
) -> dict[str, Any]:
    """The backend's options for what was given."""
    sizes = {"chunk_size": chunk_size, "head_chunk_size": head_chunk_size}
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return given if compile_bodies else {**given, "compile_bodies": False}

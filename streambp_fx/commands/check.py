"""``streambp check``: loss and gradients of one step, streamed against unstreamed."""

from __future__ import annotations

import json
import warnings
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from ..checking import NoGradientError, NoLossError, RandomnessError, check
from ..checking_text import print_check
from .program import (
    ChunkSize,
    CompileBodies,
    Config,
    DType,
    HeadChunkSize,
    Layers,
    backend_options,
    dtype_of,
    fail,
    model_with_random_weights,
    read_config,
)

CHUNKS = 3
"""How many chunks are tried where no chunk size is given."""


def check_command(
    config: Config,
    tokens: Annotated[int, typer.Option(min=2, help="Length of a row.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 2,
    dtype: DType = "fp32",
    layers: Layers = None,
    chunk_size: ChunkSize = None,
    head_chunk_size: HeadChunkSize = None,
    compile_bodies: CompileBodies = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Compare loss and gradients of one step, streamed and unstreamed, in two precisions.

    The model gets random weights and runs on the CPU, without dropout, in float64
    too: take few layers of a large one. Loop bodies are compiled first, which can
    take minutes; --no-compile-bodies checks the same loops without it. Without
    --chunk-size, three chunks are tried.

    \b
        streambp check path/to/config.json --layers 2 --no-compile-bodies
        streambp check path/to/config.json --dtype bf16 --chunk-size 64 --json

    Exits with 0 if loss and gradients are right, with 1 if one is not, with 2 if
    an argument is wrong or something that is needed is not installed.
    """
    wanted = dtype_of(dtype)
    model = model_with_random_weights(read_config(config, layers), wanted)
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (batch, tokens), generator=generator)
    size = chunk_size or -(-tokens // CHUNKS)
    options = backend_options(size, head_chunk_size or size, compile_bodies)
    progress = Console(stderr=True)
    try:
        with progress.status("building the model") as status, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch and transformers, about things not ours
            outcome = check(
                model,
                input_ids=ids,
                labels=ids,
                options=options,
                on_progress=lambda text: status.update(escape(text)),
            )
    except (RandomnessError, NoLossError, NoGradientError) as error:
        raise fail(str(error)) from error
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), indent=2))
    else:
        print_check(outcome, Console())
    if not outcome.right:
        raise typer.Exit(1)

"""``streambp bench``: peak and time of a model's step on this machine, in several ways."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.markup import escape

from ..demo import VARIANTS, allocate_gradients, prepare, reason, training_step
from ..measure import Quartiles, memory_use, step_time
from .layout import plain_table, titled
from .program import (
    Config,
    DType,
    Layers,
    check_folder,
    dtype_of,
    fail,
    model_with_random_weights,
    read_config,
)

MIB = 2**20
DEVICES = ("cpu", "cuda")
LENGTHS = (1024, 2048, 4096)


@dataclass(frozen=True)
class Measured:
    """One way at one length, or why it could not be measured.

    ``peak`` is in bytes above the step's start, gradients allocated; ``first`` is the first call's
    seconds, with compiling; ``seconds`` those of warm steps.
    """

    way: str
    tokens: int
    peak: int | None = None
    first: float | None = None
    seconds: Quartiles | None = None
    failure: str | None = None


def bench_command(
    config: Config,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=2, help="A length; repeatable.", show_default=", ".join(map(str, LENGTHS))
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="One of eager, gc (gradient checkpointing), compile (torch.compile) and streambp; "
            "repeatable.",
            show_default="all",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of a way at a length.")] = 5,
    layers: Layers = None,
    dtype: DType = "fp32",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Also write JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Measure a training step of a model with random weights, on this machine.

    A way that runs out of memory at one length is shown as failed, and the others
    go on. The first calls of compile and of streambp compile, which can take
    minutes; their seconds are shown apart.

    \b
        streambp bench path/to/config.json --layers 2 --tokens 1024 --tokens 4096
        streambp bench Qwen3-4B --dtype bf16 --device cuda --way gc --way streambp

    Exits with 0 if the streamed step was measured, with 1 if it failed, with 2 if
    an argument is wrong or something that is needed is not installed.
    """
    wanted = dtype_of(dtype)
    ways = list(way or VARIANTS)
    for name in ways:
        if name not in VARIANTS:
            raise fail(f"--way is one of {', '.join(VARIANTS)}, not {name}")
    if device not in DEVICES:
        raise fail(f"--device is one of {', '.join(DEVICES)}, not {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise fail("--device cuda: torch finds no GPU")
    check_folder(output)
    loaded = read_config(config, layers)
    progress = Console(stderr=True)
    found: list[Measured] = []
    with progress.status("building the model") as status:
        for name in ways:
            status.update(escape(VARIANTS[name]))
            torch.compiler.reset()
            # In training mode, without which checkpointing does nothing; with the dropout it has.
            model = model_with_random_weights(loaded, wanted).to(device).train()
            for measured in _measure(model, name, tokens or LENGTHS, batch, rounds, device):
                found.append(measured)
                outcome = "done" if measured.failure is None else measured.failure
                progress.print(
                    f"{VARIANTS[name]}, {measured.tokens} tokens: {outcome}", markup=False
                )
            del model
            _free(device)
    step = {"config": config, "layers": loaded.num_hidden_layers, "dtype": dtype, "batch": batch}
    report = json.dumps(step | {"measurements": [asdict(row) for row in found]}, indent=2)
    if output is not None:
        output.write_text(report + "\n")
    if as_json:
        typer.echo(report)
    else:
        title = f"One training step of {config}: {loaded.num_hidden_layers} layers, {dtype}"
        Console().print(_table(found, title if batch == 1 else f"{title}, {batch} rows"))
    if any(row.failure is not None for row in found if row.way == "streambp"):
        raise typer.Exit(1)


def _measure(
    model: Any, way: str, lengths: Any, batch: int, rounds: int, device: str
) -> Iterator[Measured]:
    """Measure ``model``, which is changed by some ways, at each length in turn."""
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    allocate_gradients(model)
    call = prepare(model, way)
    for tokens in lengths:
        ids = torch.randint(0, vocabulary, (batch, tokens), generator=generator).to(device)
        step = training_step(model, call, ids)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch and transformers, about things not ours
                first = step_time(step, device)
                peak = memory_use(step, device).peak
                seconds = Quartiles.of([step_time(step, device) for _ in range(rounds)])
            yield Measured(way, tokens, peak, first, seconds)
        except Exception as error:  # noqa: BLE001 - the row says what went wrong
            yield Measured(way, tokens, failure=reason(error))
        _free(device)


def _free(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _table(rows: list[Measured], title: str) -> Group:
    table = plain_table("step", "tokens", "peak MiB", "seconds", "first s")
    for row in rows:
        cells = [escape(VARIANTS[row.way]), str(row.tokens)]
        if row.peak is None or row.seconds is None or row.first is None:
            table.add_row(*cells, "[red]failed[/]")
            continue
        spent = row.seconds
        spread = f"{spent.median:.3f} ({spent.lower:.3f} to {spent.upper:.3f})"
        table.add_row(*cells, f"{row.peak / MIB:.1f}", spread, f"{row.first:.1f}")
    return titled(
        title,
        table,
        "Peak: bytes above the step's start, gradients allocated. Seconds: median and "
        "quartiles of warm steps. First: seconds of the first call, with compiling.",
    )

"""``streambp plan``: the longest sequence that fits on a GPU, and the chunk sizes to use."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..planning import BUNDLED, ConfigError, Plan, PlanningError, Setting, plan
from ..planning.models import load_config
from ..planning.plot import save_plot
from ..planning.setting import DTYPES, GIB, OBJECTIVES, OPTIMIZERS
from .layout import plain_table, titled
from .program import check_folder

_NAMES = ", ".join(BUNDLED)


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            help=f"A transformers config.json, the folder that holds one, or one of {_NAMES}."
        ),
    ],
    memory: Annotated[float, typer.Option(help="Memory of the GPU, GiB.")] = Setting.memory_gib,
    reserve: Annotated[
        float,
        typer.Option(
            help="Part of --memory that tensors can not have, GiB: the CUDA context and libraries' "
            "workspaces."
        ),
    ] = Setting.reserve_gib,
    dtype: Annotated[
        str,
        typer.Option(help=f"Of weights, activations and gradients: one of {', '.join(DTYPES)}."),
    ] = Setting.dtype,
    lora: Annotated[
        int | None,
        typer.Option(
            help="Rank of LoRA adapters on a frozen base; without it, all parameters are trained."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help=f"One of {', '.join(OBJECTIVES)}.")
    ] = Setting.objective,
    batch: Annotated[
        int, typer.Option(help="Sequences, pairs or groups in a step.")
    ] = Setting.batch,
    group: Annotated[int, typer.Option(help="Completions in a group, for grpo.")] = Setting.group,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Optimizer whose states are in the GPU's memory during the step: one of "
            f"{', '.join(OPTIMIZERS)}."
        ),
    ] = Setting.optimizer,
    keep_gradients: Annotated[
        bool,
        typer.Option(
            help="Plan for gradient accumulation: gradients of an earlier micro-batch are in "
            "memory when the step starts."
        ),
    ] = Setting.keeps_gradients,
    chunk_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a row in a layer's chunk; chosen by default."),
    ] = None,
    head_chunk_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a row in the head's chunk; chosen by default."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write peak against length to this picture.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
) -> None:
    """Find the longest sequence that fits on a GPU, without a GPU and without weights.

    It is found for eager, gradient checkpointing and this backend, and shown in
    tokens of a row, with the peak that it takes and with what is alive at that
    peak. The two chunk sizes are those to give to the backend as its options.
    A plan takes up to some minutes.

    \b
        streambp plan Qwen3-8B --memory 80
        streambp plan path/to/config.json --memory 24 --lora 16 --objective dpo
        streambp plan Llama-3.1-8B --objective grpo --optimizer adamw --json

    Exits with 0 if there is a plan, with 1 if the model can not be planned for,
    with 2 if an argument is wrong or something that is needed is not installed.
    """
    progress = Console(stderr=True)
    for needed, extra in (("transformers", "transformers"), ("matplotlib", "plot")):
        if find_spec(needed) is None and (needed != "matplotlib" or plot is not None):
            progress.print(escape(f"This needs: pip install 'streambp-fx[{extra}]'"))
            raise typer.Exit(2)
    check_folder(plot)
    try:
        setting = Setting(
            memory, reserve, dtype, lora, objective, batch, group, optimizer, keep_gradients
        )
        load_config(model)  # a wrong name is told before there is a progress bar to leave behind
        found = _planned(model, setting, chunk_size, head_chunk_size, progress)
        if plot is not None:
            save_plot(found, plot)
    except (ConfigError, ValueError) as error:
        progress.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    except PlanningError as error:
        progress.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        print_plan(found, Console())


def _planned(
    model: str,
    setting: Setting,
    chunk_size: int | None,
    head_chunk_size: int | None,
    console: Console,
) -> Plan:
    bar = Progress(
        BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )
    with bar, warnings.catch_warnings():
        # torch warns of its own use of its pytree while it compiles.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*LeafSpec.*")
        task = bar.add_task("building the model", total=1.0)
        return plan(
            model,
            setting,
            chunk_size=chunk_size,
            head_chunk_size=head_chunk_size,
            on_progress=lambda done, text: bar.update(
                task, completed=done, description=escape(text)
            ),
        )


def print_plan(found: Plan, console: Console) -> None:
    """The longest sequences, and what is alive at each one's peak."""
    longest = plain_table("way", "longest, tokens", "peak GiB", "chunk_size", "head_chunk_size")
    for way in found.ways:
        longest.add_row(
            way.way,
            f"{way.longest:,}" if way.longest else "does not fit",
            f"{way.peak / GIB:.2f}",
            str(way.chunk_size or "-"),
            str(way.head_chunk_size or "-"),
        )
    console.print(titled(f"{found.model}, {found.setting}", longest))
    terms = plain_table("term", *(way.way for way in found.ways))
    for name in dict.fromkeys(name for way in found.ways for name in way.terms):
        sizes = [way.terms.get(name, 0) for way in found.ways]
        terms.add_row(name, *(f"{size / GIB:.3f}" if size else "-" for size in sizes))
    console.print(titled("What is alive at that peak, GiB", terms))
    console.print(
        f"{found.parameters:,} parameters, {found.trained:,} trained; traced at "
        f"{' and '.join(map(str, found.traced))} of {found.layers} layers",
        highlight=False,
    )

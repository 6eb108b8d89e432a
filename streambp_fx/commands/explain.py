"""``streambp explain``: what the backend makes of a model, without weights and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..explaining.explanation import Explanation, explain
from ..explaining.peers import CHECKPOINTING, COMPILED, EAGER
from ..explaining.text import to_renderable
from ..gpu import TARGETS, TritonMissingError, find_target, lower_for_gpu, write_lowered
from .program import (
    ChunkSize,
    CompileBodies,
    Config,
    DType,
    HeadChunkSize,
    Layers,
    backend_options,
    check_folder,
    dtype_of,
    fail,
    model_without_data,
    need,
    read_config,
)

WAYS = {"eager": EAGER, "checkpointing": CHECKPOINTING, "compile": COMPILED}


def explain_command(
    config: Config,
    tokens: Annotated[int, typer.Option(min=2, help="Length of a row.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: DType = "bf16",
    layers: Layers = None,
    chunk_size: ChunkSize = None,
    head_chunk_size: HeadChunkSize = None,
    compile_bodies: CompileBodies = True,
    compare: Annotated[
        str,
        typer.Option(
            help=f"Other ways whose peak is predicted too: any of {', '.join(WAYS)}, separated by "
            "commas, or none. 'compile' takes longest."
        ),
    ] = ",".join(WAYS),
    html: Annotated[
        Path | None, typer.Option(help="Write the report as one page to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the memory over one step to this picture.")
    ] = None,
    graphs: Annotated[
        Path | None,
        typer.Option(
            help="Write the graph after each pass into this folder, as Python that runs and as "
            "text with shapes and source lines."
        ),
    ] = None,
    triton: Annotated[
        Path | None,
        typer.Option(help="Write the Triton sources of the loop bodies into this folder."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help=f"With --triton, the GPU that the sources are for: {', '.join(sorted(TARGETS))}."
        ),
    ] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not tables.")] = False,
) -> None:
    """Show the loops, barriers, proofs and predicted memory of a training step.

    Nothing is run and no weight is allocated: an 8B configuration takes seconds
    to minutes. The step is the one of a training loop,
    model(input_ids=ids, labels=ids).loss.backward().

    \b
        streambp explain Qwen3-8B --tokens 16384 --html report.html
        streambp explain path/to/config.json --layers 4 --compare none --json
        streambp explain Qwen3-8B --layers 2 --target h200 --triton kernels/

    Exits with 0 if all that grows with the sequence is streamed, with 1 if
    something is not, with 2 if an argument is wrong or something that is needed
    is not installed.
    """
    ways = _ways(compare)
    if plot is not None:
        need("matplotlib", "plot")
    if triton is not None:
        _check_target(target)
    check_folder(html, plot)
    model = model_without_data(read_config(config, layers), dtype_of(dtype))
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    options = backend_options(chunk_size, head_chunk_size, compile_bodies)
    found = explain(model, input_ids=ids, labels=ids, options=options, peers=ways)
    written: dict[Path, list[Path]] = {}
    if html is not None:
        written[html] = [found.to_html(html)]
    if plot is not None:
        found.plot_memory().savefig(plot, dpi=150)
        written[plot] = [plot]
    if graphs is not None:
        written[graphs] = _write_graphs(found, graphs)
    if triton is not None:
        bodies = lower_for_gpu(model, input_ids=ids, labels=ids, target=target, options=options)
        written[triton] = write_lowered(bodies, triton)
    if as_json:
        files = [str(path) for paths in written.values() for path in paths]
        typer.echo(json.dumps(found.to_dict() | {"written": files}, indent=2))
    else:
        _print(found, written)
    if not found.streams_everything:
        raise typer.Exit(1)


def _print(found: Explanation, written: dict[Path, list[Path]]) -> None:
    console = Console()
    console.print(to_renderable(found))
    for place, paths in written.items():
        text = f"wrote {place}" if paths == [place] else f"wrote {len(paths)} files into {place}"
        console.print(text, markup=False, highlight=False)


def _write_graphs(found: Explanation, folder: Path) -> list[Path]:
    """``captured.py`` and ``captured.txt`` and so on, of segments ``segment1.rewritten.py``.

    Of a second graph that Dynamo captured, ``graph1.captured.py``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, capture in enumerate(found.captures):
        start = f"graph{number}." if number else ""
        shown = {start: capture, **{f"{start}segment{s.segments[0]}.": s for s in capture.segments}}
        for prefix, graphs in shown.items():
            for name in graphs.graphs:
                texts = {".txt": graphs.print_readable(name, print_output=False)}
                texts[".py"] = graphs.python(name)
                for suffix, text in texts.items():
                    path = folder / f"{prefix}{name}{suffix}"
                    path.write_text(text, encoding="utf-8")
                    paths.append(path)
    return paths


def _check_target(target: str) -> None:
    try:
        find_target(target)
    except (ValueError, TritonMissingError) as error:
        raise fail(str(error)) from error


def _ways(compare: str) -> tuple[str, ...]:
    names = [name.strip() for name in compare.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        raise fail(f"--compare has {unknown[0]}; there are {', '.join(WAYS)} and none")
    return tuple(WAYS[name] for name in names)

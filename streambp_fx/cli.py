"""The command ``streambp``: its commands are the modules of `streambp_fx.commands`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from . import __version__
from .commands.bench import bench_command
from .commands.check import check_command
from .commands.demo import demo
from .commands.explain import explain_command
from .commands.plan import plan_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)

LEVEL_OF_NOTHING = "6"
"""Above all that Kineto tells of: errors are 4, and each start and stop of a profiler is 5."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _streambp(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train causal models on long sequences: a torch.compile backend that streams over chunks.

    In the order in which one would run them:

    \b
        streambp demo                                    see it work on a small model
        streambp explain Qwen3-8B --tokens 16384         what is streamed, and the memory
        streambp check path/to/config.json --layers 2    gradients against eager's
        streambp plan Qwen3-8B --memory 80               the longest sequence that fits
        streambp bench path/to/config.json --layers 2    peak and time on this machine
    """


app.command("demo")(demo)
app.command("explain")(explain_command)
app.command("check")(check_command)
app.command("plan")(plan_command)
app.command("bench")(bench_command)


def main() -> None:
    """Entry point of the console script."""
    # The profiler, which counts bytes, would write lines between those of the progress. Kineto
    # reads this at the first profile; a level that the user has set stays.
    os.environ.setdefault("KINETO_LOG_LEVEL", LEVEL_OF_NOTHING)
    app()


if __name__ == "__main__":
    main()

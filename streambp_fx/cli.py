"""The command ``streambp``: its commands are the modules of `streambp_fx.commands`."""

from __future__ import annotations

import typer

from .commands.demo import demo

app = typer.Typer(
    help="Train causal models on long sequences: a torch.compile backend that streams over chunks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def commands() -> None:
    """Keeps ``demo`` a command of its own: typer makes an only command the whole program."""


app.command()(demo)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

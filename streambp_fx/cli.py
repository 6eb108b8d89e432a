"""The command ``streambp``: its commands are the modules of `streambp_fx.commands`."""

from __future__ import annotations

import typer

from .commands.bench import bench_command
from .commands.check import check_command
from .commands.demo import demo
from .commands.explain import explain_command
from .commands.plan import plan_command

app = typer.Typer(
    help="Train causal models on long sequences: a torch.compile backend that streams over chunks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


app.command("demo")(demo)
app.command("explain")(explain_command)
app.command("check")(check_command)
app.command("plan")(plan_command)
app.command("bench")(bench_command)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

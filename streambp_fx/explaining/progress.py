"""Tell how far a long computation is: to a function, or as a bar in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Say = Callable[[str], object]


@contextmanager
def progress(say: Say | None, steps: int) -> Iterator[Say]:
    """Yields what to call at the beginning of each of about ``steps`` steps, with its name.

    That is ``say`` itself where it is given. Otherwise a bar is drawn on the standard error while
    the block runs, if that is a terminal.
    """
    if say is not None:
        yield say
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        begun = 0

        def next_step(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=min(begun, steps))
            begun += 1

        yield next_step

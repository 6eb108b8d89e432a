"""Run one measurement in a process of its own, with a limit, and hear of its results at once.

The process appends one line of JSON to a file for each result. A file, since a pipe would stay open
as long as any process that Inductor started to compile lives.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOG_LINES = 40

OnLine = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status, ``None`` if it ran into its limit, and its last words.

    ``log`` is the end of what it wrote to its standard streams, at most `LOG_LINES` lines.
    """

    status: int | None
    log: str

    @property
    def failure(self) -> str | None:
        """What to record, or ``None`` for a process that ended well."""
        if self.status == 0:
            return None
        if self.status is None:
            return "ran into its time limit"
        last = self.log.strip().rpartition("\n")[2]
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}" + (f": {last}" if last else "")
        return last or f"ended with {self.status}"


class Results:
    """The file of results, as the process that measures writes it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append ``line``; the other process sees it whole or not at all."""
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


_running: set[subprocess.Popen[bytes]] = set()
_stopped = threading.Event()


def stop_modules() -> None:
    """Kill what `run_module` runs in other threads; it starts nothing any more."""
    _stopped.set()
    for process in list(_running):
        _signal_group(process)


def run_module(
    module: str,
    job: Mapping[str, Any],
    seconds: float,
    on_line: OnLine,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Ended:
    """Run ``python -m module JOB RESULTS`` and call ``on_line`` with each result as it comes.

    Args:
        module: calls ``Results(argv[2]).add`` for what ``json.loads(argv[1])`` asks for.
        job: what to measure.
        seconds: the process and all that it started are killed after that time.
        on_line: called in this thread.
        environment: variables to set for it, beside those of this process.
        python: the interpreter to run.
    """
    if _stopped.is_set():
        return Ended(-signal.SIGTERM, "stopped")
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results"), Path(folder, "log")
        results.touch()
        with results.open() as lines, log.open("wb") as output:
            process = subprocess.Popen(
                [python, "-m", module, json.dumps(job), str(results)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_search_path(), **(environment or {})},
                # A group of its own can be killed with all compile workers in it.
                process_group=0,
            )
            _running.add(process)
            try:
                status = _follow(process, lines, time.monotonic() + seconds, on_line)
            finally:
                _signal_group(process)
                process.wait()
                _running.discard(process)
        return Ended(status, _tail(log))


def _follow(
    process: subprocess.Popen[bytes], lines: Any, deadline: float, on_line: OnLine
) -> int | None:
    """Pass results on until ``process`` ends (its exit status) or ``deadline`` (``None``)."""
    part = ""
    while True:
        status = process.poll()
        for line in lines:
            part += line
            if part.endswith("\n"):
                on_line(json.loads(part))
                part = ""
        if status is not None or time.monotonic() >= deadline:
            return status
        time.sleep(0.05)


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them have ended


def _search_path() -> dict[str, str]:
    """So that the package and the benchmarks are found, installed or not, from any folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])

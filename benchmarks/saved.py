"""A results file that grows with each measurement: a benchmark that was stopped goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from .machine import commit, describe

RESULTS = Path(__file__).parent / "results"

Job = dict[str, Any]


@dataclass
class Saved:
    """Measurements of jobs, each with its ``result``, or ``failure``, why there is none.

    Each has the ``commit`` that was checked out when it began, as of `machine.commit`: files grow
    over many commits. Measurements that were made before this was recorded have none.
    """

    path: Path
    machine: dict[str, Any]
    measurements: list[dict[str, Any]] = field(default_factory=list)
    began_at: str | None = field(default_factory=commit)

    @classmethod
    def open(cls, name: str, machine: dict[str, Any]) -> Saved:
        """The file of that name with what is in it, if that was measured on the same ``machine``.

        Raises:
            ValueError: the file is of another machine, or of other versions.
        """
        path = RESULTS / f"{name}.json"
        if not path.exists():
            return cls(path, machine)
        content = json.loads(path.read_text())
        if content["machine"] != machine:
            raise ValueError(
                f"{path} was measured on another machine or with other versions; choose another "
                "name, or remove it"
            )
        return cls(path, machine, content["measurements"])

    def has(self, job: Job) -> bool:
        """Whether ``job`` has a result; one that failed is measured again."""
        return any(
            measured["job"] == job and measured["failure"] is None for measured in self.measurements
        )

    def result(self, job: Job) -> dict[str, Any] | None:
        """The result of ``job``, if there is one."""
        for measured in self.measurements:
            if measured["job"] == job:
                found: dict[str, Any] | None = measured["result"]
                return found
        return None

    def add(self, job: Job, result: dict[str, Any] | None, failure: str | None) -> None:
        """Record what came of ``job``, in place of what is there of it, and write the file."""
        entry = {"job": job, "commit": self.began_at, "result": result, "failure": failure}
        self.began_at = commit()  # the next one begins now
        for index, measured in enumerate(self.measurements):
            if measured["job"] == job:
                self.measurements[index] = entry
                break
        else:
            self.measurements.append(entry)
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(".partial")
        content = {"machine": self.machine, "measurements": self.measurements}
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, self.path)

    def failed(self, jobs: Iterable[Job]) -> int:
        """How many of ``jobs`` have no result."""
        return sum(not self.has(job) for job in jobs)


def saved_results(name: str, device: str) -> Saved:
    """The results file of that name, of this machine with ``device``.

    Raises:
        typer.BadParameter: it is of another machine, or of other versions.
    """
    try:
        return Saved.open(name, describe(device))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--name") from error

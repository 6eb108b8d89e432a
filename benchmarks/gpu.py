"""Everything that only a GPU can tell, in under ten minutes: run by ``benchmarks/gpu.sh``.

    benchmarks/gpu.sh FOLDER
    benchmarks/gpu.sh FOLDER --part exactness --part peak_and_time
    benchmarks/gpu.sh FOLDER --size tiny                 on a machine without a GPU

Needs torch and transformers, nothing else. FOLDER gets one JSON file for each part, and
``summary.json``. A file is written anew after each measurement, so that little is lost if the
script is stopped; a measurement that runs out of memory, fails or takes too long is recorded, and
the next goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .gpu_plan import SIZES, Job, Part, parts
from .gpu_steps import Case
from .machine import describe
from .processes import run_module, stop_modules

log = logging.getLogger("benchmarks.gpu")

SECONDS = 570.0
LEAST_SECONDS = 5.0
"""A process that would get less time than that is not started."""


class Records:
    """The records of one part, and its file."""

    def __init__(self, folder: Path, number: int, part: str, machine: dict[str, Any]) -> None:
        self._path = folder / f"{number}_{part}.json"
        self._head = {"part": part, "machine": machine}
        self._records: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def open(self, case: Case, kind: str) -> dict[str, Any]:
        """A record for ``case``, not measured yet."""
        record = {"kind": kind, "case": case, "state": "not run"}
        with self._lock:
            self._records.append(record)
        return record

    def update(self, record: dict[str, Any], **facts: Any) -> None:
        """Put ``facts`` into ``record`` and write the file, whole."""
        with self._lock:
            record.update(facts)
            write_json(self._path, {**self._head, "records": self._records})

    def states(self) -> dict[str, int]:
        """How many records are in which state."""
        states = [record["state"] for record in self._records]
        return {state: states.count(state) for state in dict.fromkeys(states)}

    def wrong(self) -> int:
        """How many measured records say that what was computed is not right."""
        results = [record.get("result") or {} for record in self._records]
        return sum(result.get("right") is False for result in results)


def write_json(path: Path, content: Any) -> None:
    """Write ``path`` so that a reader finds either the old file or the new one, never a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def run_part(part: Part, records: Records, device: str, deadline: float) -> None:
    """Run the processes of ``part``; none is started, and none runs on, after ``deadline``."""
    opened = [[records.open(case, job.kind) for case in job.cases] for job in part.jobs]
    with ThreadPoolExecutor(part.at_once) as pool:
        futures = [
            pool.submit(run_job, job, own, records, device, deadline)
            for job, own in zip(part.jobs, opened, strict=True)
        ]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_modules()
            raise


def run_job(
    job: Job, opened: list[dict[str, Any]], records: Records, device: str, deadline: float
) -> None:
    """Measure the cases of ``job``; a process that dies costs the case that it was at."""
    ends = min(deadline, time.monotonic() + job.seconds)
    left = list(opened)

    def on_line(line: dict[str, Any]) -> None:
        record = left[0]
        if "so_far" in line:
            attempts = [*record.get("so_far", []), line["so_far"]]
            records.update(record, so_far=attempts)
            return
        del left[0]
        state = "failed" if "failure" in line else "measured"
        records.update(record, **{**line, "state": state})
        log.info("%s", told(record))

    while left:
        seconds = ends - time.monotonic()
        if seconds < LEAST_SECONDS:
            for record in left:
                records.update(record, state="not run", failure="no time was left")
            log.info("%s: %d not run, no time was left", job.kind, len(left))
            return
        message = job.message([record["case"] for record in left], device)
        ended = run_module("benchmarks.gpu_worker", message, seconds, on_line)
        if left:
            record = left.pop(0)
            failure = ended.failure or "ended without a result"
            records.update(record, state="failed", failure=failure, log=ended.log.splitlines())
            log.info("%s", told(record))


def told(record: dict[str, Any]) -> str:
    """One line about a record, for who watches."""
    words = [
        record["kind"],
        *(f"{name}={record['case'][name]}" for name in _TOLD_OF_CASES if name in record["case"]),
    ]
    if record["state"] != "measured":
        return f"{' '.join(words)}: {record.get('failure', record['state'])}"
    result = record["result"]
    facts = [f"{name} {result[name]}" for name in ("right", "error", "reached") if name in result]
    if "peak_bytes" in result:
        facts.append(f"peak {result['peak_bytes'] / 2**30:.2f} GiB")
        facts.append(f"{result['seconds']['median']:.2f} s")
    if "wall" in result:
        facts.append(f"{result['wall']:.2f} s")
    return f"{' '.join(words)}: {', '.join(facts)}"


_TOLD_OF_CASES = ("objective", "way", "dtype", "padded", "tokens")


def run(
    folder: Path, size: str, device: str, wanted: list[str], seconds: float
) -> dict[str, dict[str, int]]:
    """Run the parts that are ``wanted`` (all, if none is named) and write their files.

    Returns:
        For each part, how many measurements are in which state, and how many are ``wrong``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe(device)
    deadline = start = time.monotonic()
    outcome: dict[str, dict[str, int]] = {}
    for number, part in enumerate(parts(SIZES[size]), 1):
        if wanted and part.name not in wanted:
            continue
        deadline = min(deadline + part.seconds, start + seconds)
        log.info("part %d, %s: until %.0f s", number, part.name, deadline - start)
        records = Records(folder, number, part.name, machine)
        run_part(part, records, device, deadline)
        outcome[part.name] = {**records.states(), "wrong": records.wrong()}
        spent = round(time.monotonic() - start, 1)
        summary = {"machine": machine, "size": size, "seconds": spent, "parts": outcome}
        write_json(folder / "summary.json", summary)
    return outcome


def main() -> None:
    """Exits with 1 if a result is wrong; a measurement that failed is told by its record alone."""
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts(SIZES["full"])]
    parser.add_argument("folder", type=Path, help="where the JSON files go")
    parser.add_argument("--part", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--size", choices=sorted(SIZES), default="full" if on_cuda else "tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if on_cuda else "cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything together")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # The exception that it raises ends the processes in progress, see `run_part`.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    outcome = run(
        arguments.folder, arguments.size, arguments.device, arguments.part or [], arguments.seconds
    )
    if any(states["wrong"] for states in outcome.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()

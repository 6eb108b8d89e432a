"""Measurements of one kind on one model, in this process, which does nothing else.

    python -m benchmarks.gpu_worker '{"kind": "steps", "cases": [...], ...}' RESULTS

Appends one line of JSON to RESULTS for each case, as soon as it is known, and for each thing worth
keeping of a case that is still running. A case that fails is a line with its failure, and the next
one goes on; an error that leaves the device unusable ends the process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from .gpu_exactness import attention, gradients
from .gpu_steps import Case, Trainer, failure_of, free_memory, kernels, longest, measured
from .processes import Results
from .shapes import Shape

Tell = Callable[[dict[str, Any]], object]
Measure = Callable[[Case, Tell], dict[str, Any]]

TRACEBACK_LINES = 25


def measure_of(job: dict[str, Any]) -> Measure:
    """How to measure one case of ``job``, whose ``kind`` is one of those below."""
    kind, device = job["kind"], job["device"]
    if kind == "attention":
        return lambda case, tell: attention(case, device)
    if kind == "gradients":
        return lambda case, tell: gradients(case, device)
    trainer = Trainer(Shape(**job["shape"]), job["dtype"], device)
    if kind == "steps":
        return lambda case, tell: measured(trainer, case)
    if kind == "longest":
        return lambda case, tell: longest(trainer, case, tell)
    if kind == "kernels":
        return lambda case, tell: kernels(trainer, case)
    raise ValueError(f"unknown kind of measurement {kind!r}")


def measure_all(job: dict[str, Any], add: Tell) -> None:
    """Measure each case of ``job`` in turn and ``add`` its line.

    Raises:
        RuntimeError: the device can not be used any more; the case in progress has no line then.
    """
    measure = measure_of(job)
    for case in job["cases"]:
        try:
            line = {"case": case, "result": measure(case, _about(case, add))}
        except Exception as error:
            if not usable(job["device"]):
                raise
            trace = traceback.format_exception(error)
            line = {
                "case": case,
                **failure_of(error),
                "traceback": "".join(trace).splitlines()[-TRACEBACK_LINES:],
            }
        add(line)
        free_memory(job["device"])


def _about(case: Case, add: Tell) -> Tell:
    """What is worth keeping of ``case`` before it ends, in case that it does not."""
    return lambda so_far: add({"case": case, "so_far": so_far})


def usable(device: str) -> bool:
    """Whether the device still works: an illegal access makes every later call on it fail."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    measure_all(json.loads(sys.argv[1]), Results(sys.argv[2]).add)


if __name__ == "__main__":
    main()

"""Steps of a model on this device: peak and time, the longest length, objectives, kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from streambp_fx import last_report
from streambp_fx.demo import reason, training_step
from streambp_fx.measure import Quartiles, Step, memory_use, step_time

from .objectives import OBJECTIVES, batch_of, objective_step
from .shapes import DTYPES, Shape, build, random_tokens
from .ways import Way
from .worker import profiled_step

GIB = 2**30

Case = dict[str, Any]


class Trainer:
    """A model of one shape, run in one way at a time; a way that changes gets a new model.

    One compilation serves all lengths (``dynamic=True``): a second one costs as much again. No
    gradients exist before a step, as the optimizers' ``zero_grad`` leaves it; its peak holds them.
    """

    def __init__(self, shape: Shape, dtype: str, device: str) -> None:
        self.shape = shape
        self.device = device
        self._dtype = DTYPES[dtype]
        self._now: tuple[str, str] | None = None
        self._ready: tuple[nn.Module, Callable[..., Any]] | None = None

    def step(self, way: str, tokens: int, rows: int = 1, objective: str = "") -> Step:
        """A step on ``rows`` sequences of ``tokens``; ``objective`` is one of `OBJECTIVES`."""
        model, call = self.ready(way, objective)
        ids = random_tokens(self.shape, rows, tokens, self.device)
        if objective:
            run = objective_step(objective, model, call, batch_of(objective, ids))
        else:
            run = training_step(model, call, ids)

        def step() -> None:
            model.zero_grad()
            run()

        model.zero_grad()
        return step

    def ready(self, way: str, objective: str = "") -> tuple[nn.Module, Callable[..., Any]]:
        """The model, and it or the objective as ``way`` runs it."""
        if self._now != (way, objective) or self._ready is None:
            self._ready = None
            torch.compiler.reset()
            free_memory(self.device)
            model = build(self.shape, self._dtype, self.device)
            function = OBJECTIVES[objective][0] if objective else None
            self._ready = model, Way.parse(way).prepare(model, function, dynamic=True)
            self._now = (way, objective)
        return self._ready

    def peak(self, step: Step) -> int:
        """The most bytes alive in ``step``, gradients included, above those alive before it."""
        if self._ready is not None:
            self._ready[0].zero_grad()
        free_memory(self.device)
        return memory_use(step, self.device).peak


def free_memory(device: str) -> None:
    """Give back what is dead: cycles that hold tensors, and the allocator's cache on CUDA."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def measured(trainer: Trainer, case: Case) -> dict[str, Any]:
    """Peak and seconds of a warm step, and the first one's seconds, with compiling.

    ``case``: ``way``, ``tokens``, ``rounds``, and maybe ``rows`` and ``objective``. ``live_bytes``
    on a GPU: weights and gradients, all that is there between steps.
    """
    free_memory(trainer.device)
    way, objective = case["way"], case.get("objective", "")
    step = trainer.step(way, case["tokens"], case.get("rows", 1), objective)
    first = step_time(step, trainer.device)
    peak = trainer.peak(step)
    times = [step_time(step, trainer.device) for _ in range(case["rounds"])]
    result = {
        "peak_bytes": peak,
        "seconds": asdict(Quartiles.of(times)),
        "first_seconds": first,
        **_streamed(way),
    }
    if torch.device(trainer.device).type == "cuda":
        result["live_bytes"] = torch.cuda.memory_allocated(trainer.device)
    return result


def _streamed(way: str) -> dict[str, Any]:
    report = last_report() if Way.parse(way).name == "streambp" else None
    return {} if report is None else {"streamed": report.summary(), "problems": report.problems()}


@dataclass(frozen=True)
class Attempt:
    """A length that was tried: whether it fitted, and the seconds that took."""

    tokens: int
    fits: bool
    seconds: float


def longest(trainer: Trainer, case: Case, tell: Callable[[dict[str, Any]], object]) -> Case:
    """The longest sequence whose step fits in ``limit_gib``, weights and gradients included.

    A limit below the GPU's memory keeps the lengths, and so the minutes, few. On a CPU, where none
    can be set, the step's peak is held against it. ``case``: ``way``, ``limit_gib``, ``start``,
    ``most``, ``bisections``. ``tell`` hears of each attempt.
    """
    limit = int(case["limit_gib"] * GIB)
    on_cuda = torch.device(trainer.device).type == "cuda"
    if on_cuda:
        total = torch.cuda.get_device_properties(trainer.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def fits(tokens: int) -> bool:
        try:
            peak = trainer.peak(trainer.step(case["way"], tokens))
        except torch.OutOfMemoryError:
            return False
        return on_cuda or peak <= limit

    reached, failed = 0, None
    for attempt in search(fits, case["start"], case["most"], case["bisections"]):
        if attempt.fits:
            reached = max(reached, attempt.tokens)
        else:
            failed = attempt.tokens
        tell({"reached": reached, "too_long": failed, "last_attempt": asdict(attempt)})
    return {"reached": reached, "too_long": failed}


def search(
    fits: Callable[[int], bool], start: int, most: int, bisections: int
) -> Iterator[Attempt]:
    """Double from ``start`` up to ``most`` until a length does not fit, then bisect."""

    def attempt(tokens: int) -> Attempt:
        begun = time.perf_counter()
        return Attempt(tokens, fits(tokens), time.perf_counter() - begun)

    reached, tokens = 0, start
    while tokens <= most:
        tried = attempt(tokens)
        yield tried
        if not tried.fits:
            break
        reached, tokens = tokens, 2 * tokens
    else:
        return
    failed = tokens
    for _ in range(bisections):
        middle = (reached + failed) // 2
        if middle in (reached, failed):
            return
        tried = attempt(middle)
        yield tried
        if tried.fits:
            reached = middle
        else:
            failed = middle


def kernels(trainer: Trainer, case: Case) -> dict[str, Any]:
    """Where the seconds of a warm step go, by kind of work and by kernel.

    ``case``: ``way`` and ``tokens``. ``idle``: seconds of the step that no kernel ran in, where
    ``wall`` was measured without the profiler; on a CPU kernels are ops, and nothing is idle.
    """
    free_memory(trainer.device)
    step = trainer.step(case["way"], case["tokens"])
    step()
    step()
    wall = step_time(step, trainer.device)
    model, call = trainer.ready(case["way"])
    ids = random_tokens(trainer.shape, 1, case["tokens"], trainer.device)
    spent = profiled_step(model, call, ids)
    if torch.device(trainer.device).type == "cuda":
        spent["idle"] = wall - sum(spent["kinds"].values())
    return {"wall": wall, **spent}


def failure_of(error: BaseException) -> dict[str, Any]:
    """What goes into a record for a measurement that raised."""
    return {"failure": reason(error), "out_of_memory": isinstance(error, torch.OutOfMemoryError)}

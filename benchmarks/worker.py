"""One measurement of the reference step, in this process, which does nothing else.

    python -m benchmarks.worker '{"part": "memory", "mode": "gc", "tokens": 4096, ...}'

Prints one line of JSON, the last on standard output. The step is the one of a plain training
script: ``model(input_ids=ids, labels=ids).loss.backward()``, ``use_cache`` as it comes.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from streambp_fx.demo import allocate_gradients, build_model, prepare, training_step
from streambp_fx.measure import Quartiles, memory_use, paired_ratio, paired_times, step_time

VOCABULARY = 32000
WIDTH = 512
INTERMEDIATE = 1536
HEADS = 8

KINDS = {
    "attention": ("attention", "flash", "fmha", "efficient"),
    "matrix products": ("mm", "linear", "matmul", "gemm", "nvjet", "cutlass"),
    "copies": ("copy_", "Memcpy", "Memset", "clone", "cat", "fill_", "zero_"),
    "compiled kernels": ("cpp_fused", "triton_"),
}
"""Kinds of work, told from parts of an event's name; the first that fits counts."""


@dataclass(frozen=True)
class Job:
    """What to measure: ``part`` is a key of `PARTS`, ``mode`` one of the demo's variants."""

    part: str
    mode: str
    tokens: int
    layers: int = 4
    rounds: int = 9
    device: str = "cpu"


@dataclass
class Prepared:
    """A model with its gradients allocated, and the step that trains it."""

    model: torch.nn.Module
    call: Callable[..., Any]
    ids: torch.Tensor
    step: Callable[[], None]


def prepared(job: Job, mode: str | None = None) -> Prepared:
    """The reference model as ``mode`` (else the job's own) runs it."""
    model = build_model(
        layers=job.layers,
        width=WIDTH,
        vocabulary=VOCABULARY,
        intermediate=INTERMEDIATE,
        heads=HEADS,
    )
    torch.nn.Module.to(model, job.device)
    allocate_gradients(model)
    call = prepare(model, mode or job.mode)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (1, job.tokens), generator=generator).to(job.device)
    return Prepared(model, call, ids, training_step(model, call, ids))


def memory(job: Job) -> dict[str, Any]:
    """Peak of a warm step, and the live bytes before the first call and after a step."""
    alive: list[Prepared] = []

    def build() -> None:
        alive.append(prepared(job))

    def build_and_train() -> None:
        build()
        alive[0].step()
        alive[0].step()

    before = memory_use(build, job.device).left
    alive.clear()
    after = memory_use(build_and_train, job.device).left
    use = memory_use(alive[0].step, job.device)
    return {"live_before": before, "live_after": after, "peak": use.peak, "left": use.left}


def resident(job: Job) -> dict[str, Any]:
    """Peak resident size of this process (its GPU's memory not counted), two steps long."""
    step = prepared(job).step
    before = _peak_resident()
    step()
    step()
    return {"before": before, "peak": _peak_resident()}


def _peak_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def paired(job: Job) -> dict[str, Any]:
    """Seconds of interleaved steps of this mode and of gradient checkpointing, and their ratio."""
    steps = {"gc": prepared(job, "gc").step}
    if job.mode != "gc":
        steps[job.mode] = prepared(job).step
    for step in steps.values():
        step()
        step()
    times = paired_times(steps, job.rounds, job.device)
    ratio = paired_ratio(times[job.mode], times["gc"])
    seconds = {mode: asdict(Quartiles.of(values)) for mode, values in times.items()}
    return {"ratio": asdict(ratio), "seconds": seconds, "times": times}


def phases(job: Job) -> dict[str, Any]:
    """Seconds of one warm step's forward and backward, and of the kinds of work within."""
    ready = prepared(job)
    ready.step()
    ready.step()
    return profiled_step(ready.model, ready.call, ready.ids)


def profiled_step(
    model: torch.nn.Module, call: Callable[..., Any], ids: torch.Tensor
) -> dict[str, Any]:
    """Seconds of one step on ``ids``: of its phases, of kinds of work, and the longest by name.

    The phases' are the CPU's, which on a GPU only launches. The others are of kernels on a GPU,
    of ops without those they call on a CPU.
    """
    on_gpu = ids.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        model.zero_grad(set_to_none=False)
        with record_function("phase:forward"):
            loss = call(input_ids=ids, labels=ids).loss
        with record_function("phase:backward"):
            loss.backward()
        if on_gpu:
            torch.cuda.synchronize(ids.device)
    spent: dict[str, float] = {}
    named: dict[str, float] = {}
    marked: dict[str, float] = {}
    for event in profiled.key_averages():
        runs_on_gpu = event.device_type != torch.autograd.DeviceType.CPU
        if event.key.startswith("phase:") and not runs_on_gpu:
            marked[event.key.removeprefix("phase:")] = event.cpu_time_total / 1e6
        # Spans that mark others, and on a GPU the ops whose kernels are events of their own.
        if on_gpu and (not runs_on_gpu or event.is_user_annotation):
            continue
        seconds = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        named[event.key] = named.get(event.key, 0.0) + seconds
        kind = kind_of(event.key)
        spent[kind] = spent.get(kind, 0.0) + seconds
    top = sorted(named.items(), key=lambda item: -item[1])[:15]
    return {"phases": marked, "kinds": spent, "top": dict(top)}


def kind_of(name: str) -> str:
    """The kind of work of the profiler event ``name``."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other"


def compile_time(job: Job) -> dict[str, Any]:
    """Seconds of the first step less a warm one: tracing and compiling, with nothing cached."""
    step = prepared(job).step
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    warm = min(step_time(step, job.device) for _ in range(2))
    return {"first": first, "warm": warm, "compile": first - warm}


PARTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "memory": memory,
    "resident": resident,
    "time": paired,
    "phases": phases,
    "compile": compile_time,
}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    sys.stdout.write("\n" + json.dumps(PARTS[job.part](job)) + "\n")


if __name__ == "__main__":
    main()

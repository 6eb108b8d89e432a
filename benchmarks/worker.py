"""One measurement of the reference step, in this process, which does nothing else.

    python -m benchmarks.worker '{"part": "memory", "mode": "gc", "tokens": 4096, ...}' RESULTS

Writes one line of JSON to RESULTS. The step is the one of a plain training script,
``model(input_ids=ids, labels=ids).loss.backward()``, ``use_cache`` as it comes, or that of an
objective.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from streambp_fx.demo import (
    Gradients,
    allocate_gradients,
    build_model,
    training_step,
)
from streambp_fx.measure import (
    Quartiles,
    gradient_error,
    memory_use,
    paired_ratio,
    paired_times,
    step_time,
)

from .objectives import OBJECTIVES, batch_of, objective_step
from .processes import Results
from .ways import Way

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
    """What to measure: ``part`` is a key of `PARTS`, ``mode`` a way (see `benchmarks.ways`).

    ``objective``: one of `OBJECTIVES`; by default the loss is the model's own.
    """

    part: str
    mode: str
    tokens: int
    layers: int = 4
    rounds: int = 9
    device: str = "cpu"
    rows: int = 1
    vocabulary: int = VOCABULARY
    objective: str = ""


@dataclass
class Prepared:
    """A model with its gradients allocated, and the step that trains it.

    ``parameters``: by the names they had before a way wrapped parts of the model.
    """

    model: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    call: Callable[..., Any]
    ids: torch.Tensor
    step: Callable[[], None]


def prepared(job: Job, mode: str | None = None) -> Prepared:
    """The reference model as ``mode`` (else the job's own) runs it."""
    model = build_model(
        layers=job.layers,
        width=WIDTH,
        vocabulary=job.vocabulary,
        intermediate=INTERMEDIATE,
        heads=HEADS,
    )
    torch.nn.Module.to(model, job.device)
    allocate_gradients(model)
    parameters = dict(model.named_parameters())
    way = Way.parse(mode or job.mode)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, job.vocabulary, (job.rows, job.tokens), generator=generator)
    ids = ids.to(job.device)
    if not job.objective:
        call = way.prepare(model)
        return Prepared(model, parameters, call, ids, training_step(model, call, ids))
    call = way.prepare(model, OBJECTIVES[job.objective][0])
    add_gradients = objective_step(job.objective, model, call, batch_of(job.objective, ids))

    def step() -> None:
        model.zero_grad(set_to_none=False)
        add_gradients()

    return Prepared(model, parameters, call, ids, step)


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


def optimizer_in_backward(job: Job) -> dict[str, Any]:
    """Peak of a step in which SGD uses and frees each gradient as it is accumulated."""
    ready = prepared(job)
    sizes = [each.numel() * each.element_size() for each in ready.parameters.values()]

    def use(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-6)
        parameter.grad = None

    for parameter in ready.parameters.values():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(use)

    def step() -> None:
        ready.call(input_ids=ready.ids, labels=ready.ids).loss.backward()

    step()
    step()
    peak = memory_use(step, job.device).peak
    return {"peak": peak, "gradients": sum(sizes), "largest": max(sizes)}


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
    """Seconds of interleaved steps of this mode and of gradient checkpointing, and their ratio.

    Gradient checkpointing is of the model's own loss where the objective is another way to it.
    """
    own_loss = replace(job, objective="") if job.objective == "linear_cross_entropy" else job
    steps = {"gc": prepared(own_loss, "gc").step}
    own = "gc"
    if (job.mode, own_loss) != ("gc", job):
        own = job.mode if job.mode != "gc" else f"gc, {job.objective}"
        steps[own] = prepared(job).step
    for step in steps.values():
        step()
        step()
    times = paired_times(steps, job.rounds, job.device)
    ratio = paired_ratio(times[own], times["gc"])
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
    return add_up(profiled.key_averages(), on_gpu)


def add_up(averages: Iterable[Any], on_gpu: bool) -> dict[str, Any]:
    """Seconds by phase, by kind of work and by name, of the profiler's ``key_averages``."""
    spent: dict[str, float] = {}
    named: dict[str, float] = {}
    marked: dict[str, float] = {}
    for event in averages:
        if event.key.startswith("phase:") and event.device_type == DeviceType.CPU:
            marked[event.key.removeprefix("phase:")] = event.cpu_time_total / 1e6
        # On a GPU kernels are events of their own, and a span of ops is repeated there as such.
        if on_gpu and (event.device_type == DeviceType.CPU or event.is_user_annotation):
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


def exactness(job: Job) -> dict[str, Any]:
    """The worst relative gradient error of a step against eager in fp64, and both losses.

    Of the model's own loss; an objective has a test of its own.
    """
    wide = prepared(job, "eager")
    wide.model.double()
    exact_loss, exact = _loss_and_gradients(wide)
    loss, gradients = _loss_and_gradients(prepared(job))
    return {"error": gradient_error(gradients, exact), "loss": loss, "fp64_loss": exact_loss}


def _loss_and_gradients(ready: Prepared) -> tuple[float, Gradients]:
    allocate_gradients(ready.model)
    loss = ready.call(input_ids=ready.ids, labels=ready.ids).loss
    loss.backward()
    return float(loss.detach()), {name: each.grad for name, each in ready.parameters.items()}


def compile_time(job: Job) -> dict[str, Any]:
    """Seconds of the first step less a warm one; what Inductor compiled, and found on disk."""
    step = prepared(job).step
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    warm = min(step_time(step, job.device) for _ in range(2))
    bodies = {found: counters["inductor"][f"fxgraph_cache_{found}"] for found in ("miss", "hit")}
    return {"first": first, "warm": warm, "compile": first - warm, "bodies": bodies}


PARTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "memory": memory,
    "resident": resident,
    "time": paired,
    "phases": phases,
    "exactness": exactness,
    "compile": compile_time,
    "optimizer": optimizer_in_backward,
}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    Results(sys.argv[2]).add(PARTS[job.part](job))


if __name__ == "__main__":
    main()

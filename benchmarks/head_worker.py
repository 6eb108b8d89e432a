"""One way to run a head and its loss, in this process, which does nothing else.

python -m benchmarks.head_worker '{"way": "compile", "vocabulary": 32000, ...}' RESULTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_fx import last_report
from streambp_fx.demo import allocate_gradients
from streambp_fx.measure import (
    Quartiles,
    Step,
    gradient_error,
    memory_use,
    paired_ratio,
    paired_times,
)

from .processes import Results
from .shapes import DTYPES
from .ways import Way, options_of

OP = "linear_cross_entropy"
BASELINE = "compile"
SCALE = 0.02
BLOCK = 256
"""Rows whose logits the fp64 reference holds at once."""


@dataclass(frozen=True)
class HeadJob:
    """``way``: one of `Way`'s, or `OP` with the options of ``torch.nn.LinearCrossEntropyOptions``.

    ``rounds``: pairs of timed steps, of this way and of `BASELINE`; 0 for none. ``exactness``:
    whether to compare the gradients with those in fp64, which takes as long as many steps.
    """

    way: str
    vocabulary: int
    dtype: str
    tokens: int = 8192
    width: int = 1024
    rounds: int = 0
    exactness: bool = True
    device: str = "cpu"


class Head(nn.Module):
    """Mean cross entropy of the logits of ``hidden`` ``[tokens, width]``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight), targets)


class OpHead(Head):
    """The same by torch's own op, which takes the logits in chunks."""

    def __init__(self, weight: Tensor, way: str) -> None:
        super().__init__(weight)
        self._options = nn.LinearCrossEntropyOptions(**options_of(way))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, self.weight, targets, options=self._options)


@dataclass
class Prepared:
    """A head, its inputs, all gradients allocated, and the step."""

    head: Head
    hidden: Tensor
    targets: Tensor
    step: Step

    @classmethod
    def of(cls, job: HeadJob, way: str) -> Prepared:
        """The head of ``job`` as ``way`` runs it; the same numbers for every way."""
        generator = torch.Generator().manual_seed(0)

        def normal(rows: int, scale: float) -> Tensor:
            drawn = torch.randn(rows, job.width, generator=generator).mul_(scale)
            return drawn.to(DTYPES[job.dtype]).to(job.device)

        hidden, weight = normal(job.tokens, 1.0).requires_grad_(), normal(job.vocabulary, SCALE)
        targets = torch.randint(0, job.vocabulary, (job.tokens,), generator=generator)
        targets = targets.to(job.device)
        is_op = way.partition(":")[0] == OP
        head = OpHead(weight, way) if is_op else Head(weight)
        call: Callable[..., Any] = head if is_op else Way.parse(way).prepare(head)
        hidden.grad = torch.zeros_like(hidden)
        allocate_gradients(head)

        def step() -> None:
            for tensor in (hidden, head.weight):
                if tensor.grad is not None:
                    tensor.grad.zero_()
            call(hidden, targets).backward()

        return cls(head, hidden, targets, step)


def measure(job: HeadJob) -> dict[str, Any]:
    """Peak of a warm step, its gradients' error against fp64, and seconds if asked for."""
    ready = Prepared.of(job, job.way)
    step = ready.step
    step()
    chunked = auto_chunked()
    result: dict[str, Any] = {"peak": memory_use(step, job.device).peak}
    if job.exactness:
        result["error"] = _error(job, ready)
    if "auto_chunker" in job.way:
        result["accepted"] = chunked > 0
    report = last_report()
    if job.way.startswith("streambp") and report is not None:
        result |= {"streamed": report.summary(), "problems": report.problems()}
    if job.rounds:
        result |= _times(job, step)
    return result


def auto_chunked() -> int:
    """How many graphs Inductor's auto_chunker took since the process began."""
    from torch._inductor import metrics

    return metrics.num_auto_chunking


def _error(job: HeadJob, ready: Prepared) -> float:
    """Against the formula in fp64, a block of rows at a time: the logits of all are too many.

    With ``z = h W^T``, ``dz = (softmax(z) - onehot(y)) / N``, ``dh = dz W`` and ``dW = dz^T h``.
    """
    hidden, weight = ready.hidden.detach().double(), ready.head.weight.detach().double()
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for rows in torch.arange(job.tokens, device=job.device).split(BLOCK):
        slope = torch.softmax(hidden[rows] @ weight.T, -1)
        slope[torch.arange(len(rows)), ready.targets[rows]] -= 1.0
        slope /= job.tokens
        grad_hidden[rows] = slope @ weight
        grad_weight.addmm_(slope.T, hidden[rows])
    got = {"hidden": ready.hidden.grad, "weight": ready.head.weight.grad}
    return gradient_error(got, {"hidden": grad_hidden, "weight": grad_weight})


def _times(job: HeadJob, step: Step) -> dict[str, Any]:
    steps = {BASELINE: step}
    if job.way != BASELINE:
        steps = {BASELINE: Prepared.of(job, BASELINE).step, job.way: step}
    for each in steps.values():
        each()
    times = paired_times(steps, job.rounds, job.device)
    ratio = paired_ratio(times[job.way], times[BASELINE])
    return {"ratio": asdict(ratio), "seconds": asdict(Quartiles.of(times[job.way]))}


def main() -> None:
    Results(sys.argv[2]).add(measure(HeadJob(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()

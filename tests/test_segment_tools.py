"""Tools of PyTorch and of trainers, on the segments of a compiled step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from streambp_fx.measure import memory_use
from tests.backend import BACKEND, needs_report, streamed
from tests.models import make_batch
from tests.oracle import assert_same_grads, run
from tests.own_models import Block, FusedAttention, NanoGPT

CHUNK = 8


@torch._dynamo.config.patch(optimize_ddp=False)  # type: ignore[untyped-decorator]
def test_buckets_are_reduced_while_backward_runs(tmp_path: Path) -> None:
    """One graph, which Dynamo does not split at the buckets itself."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = NanoGPT(layers=3).double()
        batch = make_batch(2, 29)
        parallel = DistributedDataParallel(streamed(model, chunk_size=CHUNK), bucket_cap_mb=0.02)
        events: list[str] = []

        def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            events.append("bucket")
            return allreduce_hook(state, bucket)

        reduce.__annotations__.clear()  # DDP compares them with types, and here they are strings
        group: Any = dist.group.WORLD
        parallel.register_comm_hook(group, reduce)
        parallel(**batch).backward()  # after the first step, DDP orders its buckets anew
        model.zero_grad()
        events.clear()
        model.token.weight.register_hook(lambda _: events.append("embedding"))
        parallel(**batch).backward()
        got = {name: weight.grad for name, weight in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    torch.manual_seed(0)
    assert_same_grads(got, run(NanoGPT(layers=3).double(), batch).grads)
    before = events[: events.index("embedding")]
    assert before.count("bucket") >= 3, events


class Stack(nn.Module):
    """Blocks, in groups that are recomputed or not."""

    def __init__(self, layers: int, group: int) -> None:
        super().__init__()
        blocks = [Block(FusedAttention()) for _ in range(layers)]
        self.groups = nn.ModuleList(
            nn.Sequential(*blocks[start : start + group]) for start in range(0, layers, group)
        )

    def run(self, x: Tensor, keep: bool, calls: list[Callable[..., Any]]) -> Tensor:
        for call in calls:
            x = call(x) if keep else checkpoint(call, x, use_reentrant=False)
        return x.square().mean()


def test_a_checkpoint_around_a_group_of_segments_is_a_group_of_cuts() -> None:
    """Sixteen layers in groups of four keep four hidden states, and four of one group."""
    torch.manual_seed(0)
    layers, group, tokens = 16, 4, 2048
    stack = Stack(layers, group)
    x = torch.randn(1, tokens, 32, requires_grad=True)
    calls = [streamed(one, chunk_size=128, fresh=False, lowered=False) for one in stack.groups]
    for weight in stack.parameters():
        weight.grad = torch.zeros_like(weight)
    x.grad = torch.zeros_like(x)
    peaks = {}
    found = {}
    for keep in (True, False):
        stack.zero_grad(set_to_none=False)

        def step(keep: bool = keep) -> None:
            stack.run(x, keep, calls).backward()

        step()
        found[keep] = [weight.grad.clone() for weight in stack.parameters()]
        peaks[keep] = memory_use(step).peak
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    hidden = tokens * 32 * 4
    saved = layers - (layers // group + group)
    assert peaks[True] - peaks[False] >= (saved - 2) * hidden


@needs_report
def test_offloaded_activations_are_the_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's hooks, which move on an accelerator what they only see here."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    offloading = pytest.importorskip("trl.models.activation_offloading")
    torch.manual_seed(0)
    model, batch = NanoGPT(layers=3), make_batch(2, 29)
    function = streamed(model, chunk_size=CHUNK)
    want = run(model, batch, function).grads
    hooks = offloading.OffloadActivations(use_pin_memory=False, use_streams=False)
    seen: list[tuple[int, ...]] = []
    pack = hooks.pack_hook

    def noted(activation: Tensor) -> Any:
        seen.append(tuple(activation.shape))
        return pack(activation)

    hooks.pack_hook = noted
    with torch.autograd.graph.saved_tensors_hooks(noted, hooks.unpack_hook):
        loss = function(**batch)
    model.zero_grad()
    loss.backward()
    assert_same_grads({name: p.grad for name, p in model.named_parameters()}, want)
    hidden = tuple(want["norm.weight"].shape)  # type: ignore[union-attr]
    assert seen.count((2, 29, *hidden)) <= 5  # the inputs of three layers and of the head


SECOND = """
import json, sys, torch
from torch._dynamo.utils import counters
from tests.own_models import NanoGPT
torch.manual_seed(0)
model, ids = NanoGPT(layers=2), torch.arange(58).reshape(2, 29)
compiled = torch.compile(model, backend="streambp", options={"chunk_size": 8})
compiled(ids, ids).backward()
found = {name: count for name, count in counters["inductor"].items() if "fxgraph_cache" in name}
print(json.dumps(found))
"""


@pytest.mark.skipif(BACKEND != "streambp", reason="it is about this backend's bodies")
def test_a_second_process_compiles_no_body(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.getcwd(),
    }
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", SECOND]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    first, second = found
    assert first["fxgraph_cache_miss"] >= 5 and "fxgraph_cache_hit" not in first
    assert second == {"fxgraph_cache_hit": first["fxgraph_cache_miss"]}

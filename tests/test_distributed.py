"""Data parallel training: each gradient is reduced once a step, whatever the number of chunks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.backend import streamed
from tests.models import make_batch
from tests.oracle import assert_same_grads, run
from tests.own_models import NanoGPT

PROCESSES = 2
CHUNK = 8


def _model() -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT().double()


def _train(rank: int, folder: str, compiled_outside: bool) -> None:
    """One process: a step on its rows, with the reductions counted; the first one compares."""
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous-{compiled_outside}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=PROCESSES)
    # No label is ignored, so that the mean over all rows is that of the processes' means.
    whole = make_batch(2 * PROCESSES, 37, ignored=0.0)
    model = _model()
    reduced: list[int] = []

    def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.extend(map(id, bucket.parameters()))
        return allreduce_hook(state, bucket)

    # DDP compares annotations with types, and here they are strings.
    count.__annotations__.clear()
    if compiled_outside:
        parallel = DistributedDataParallel(model)
        function = streamed(parallel, chunk_size=CHUNK)
    else:
        function = parallel = DistributedDataParallel(streamed(model, chunk_size=CHUNK))
    group: Any = dist.group.WORLD
    parallel.register_comm_hook(group, count)
    own = {name: value[2 * rank : 2 * rank + 2] for name, value in whole.items()}
    for _ in range(2):
        reduced.clear()
        model.zero_grad()
        function(**own).backward()
    assert sorted(reduced) == sorted(map(id, model.parameters()))
    got = {name: weight.grad for name, weight in model.named_parameters()}
    assert_same_grads(got, run(_model(), whole).grads)
    dist.destroy_process_group()


def test_each_gradient_is_reduced_once_a_step() -> None:
    for compiled_outside in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_train, args=(str(Path(folder)), compiled_outside), nprocs=PROCESSES)

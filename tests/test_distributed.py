"""Data parallel training: each gradient is reduced once a step, whatever the number of chunks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutput

from streambp_fx.deferred import DeferredTensor
from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.models import build, make_batch, make_dtype_preserving
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


class Regularised(NanoGPT):
    """Its loss has a term that grows from layer to layer: parts hand on a scalar beside ``x``."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        x = self.token(input_ids)
        penalty = x.square().mean()
        for block in self.blocks:
            x = block(x)
            penalty = penalty + x.square().mean()
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss + penalty, logits=logits)


LARGE = 8192
"""Tokens in a vocabulary whose head in float64 is larger than DDP's first bucket, of 1 MiB."""


def _llama() -> nn.Module:
    model: nn.Module = make_dtype_preserving(build("llama", vocab_size=LARGE, num_hidden_layers=1))
    return model


def _regularised() -> nn.Module:
    torch.manual_seed(0)
    model = Regularised(1, tied=False, vocab=LARGE).double()
    model.position.requires_grad_(False)  # not read, which DDP refuses
    return model


def _train_split(rank: int, folder: str) -> None:
    """One process: Dynamo splits the step at DDP's buckets, of default sizes."""
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=PROCESSES)
    whole = make_batch(2 * PROCESSES, 29, ignored=0.0)
    own = {name: value[2 * rank : 2 * rank + 2] for name, value in whole.items()}
    for make in (_llama, _regularised):
        model = make()
        counters.clear()
        parallel = DistributedDataParallel(streamed(model, chunk_size=CHUNK))
        output = parallel(**own)
        assert counters["aot_autograd"]["total"] > 1, "the step was not split"
        output.loss.backward()
        got = {name: weight.grad for name, weight in model.named_parameters()}
        assert_same_grads(got, run(make(), whole).grads)
        assert_streamed_whole()
        assert isinstance(output.logits, DeferredTensor)
        torch.testing.assert_close(output.logits.detach(), model(**own).logits.detach())
    dist.destroy_process_group()


@needs_report
def test_a_step_that_is_split_at_buckets_is_streamed_and_exact() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_train_split, args=(folder,), nprocs=PROCESSES)

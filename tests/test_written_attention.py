"""Mixing of tokens that is written out and is no softmax attention, or one with extras.

Such a layer streams over rows of queries, with all keys and values: exact, without a barrier, and
without a ``T x T`` tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend import assert_streamed_whole, last_report, needs_report, streamed
from tests.marks import slow_but
from tests.oracle import (
    assert_error_not_larger_than_eager,
    assert_exact_fp64,
    assert_same_step,
    run,
)
from tests.own_models import HIDDEN, VOCAB
from tests.watch import assert_no_allocation_of

HEADS = 2
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def _future(scores: Tensor) -> Tensor:
    index = torch.arange(scores.shape[-1])
    return index[:, None] < index


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT / 5) * 5
    return scores.masked_fill(_future(scores), -math.inf).softmax(-1) @ v


def filled_and_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    lowest = torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(_future(scores), lowest, scores)
    bias = torch.where(_future(scores), lowest, torch.zeros((), dtype=scores.dtype))
    return (scores + bias).softmax(-1) @ v


def multiplied_by_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.0
    return scores.masked_fill(_future(scores), -math.inf).softmax(-1) @ v


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(_future(scores), 0.0) @ v


def squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = F.relu(q @ k.mT).square()
    return scores.masked_fill(_future(scores), 0.0) @ v


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.sigmoid(q @ k.mT)
    return scores.masked_fill(_future(scores), 0.0) @ v


def keys_in_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(k @ q.mT)
    return scores.masked_fill(_future(scores).mT, -math.inf).softmax(-2).mT @ v


def difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = q @ k.mT, torch.tanh(k @ q.mT)
    future = _future(one)
    weights = one.masked_fill(future, -math.inf).softmax(-1)
    return (weights - 0.5 * other.masked_fill(future, -math.inf).softmax(-1)) @ v


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = -(q[..., :1] - k[..., :1].mT).square()
    return scores.masked_fill(_future(scores), -math.inf).softmax(-1) @ v


def not_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT).softmax(-1) @ v


def gated_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The gradient of the scores is read by two sums over rows, one of them by way of views."""
    batch, heads, length, _ = q.shape
    gate = F.softplus(v.sum(-1))[:, :1, None]
    repeated = gate[:, :, None].expand(batch, 1, heads, length, length)
    scores = q @ k.mT + repeated.reshape(batch, heads, length, length)
    return scores.masked_fill(_future(scores), -math.inf).softmax(-1) @ v


def sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = scores.masked_fill(_future(scores), -math.inf)
    weights = torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)
    return weights[..., :-1] @ v


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(q.shape[-2], dtype=q.dtype)
    decay = (0.9 ** (index[:, None] - index)).tril()
    scores = q @ k.mT * (decay / decay.sum(-1, keepdim=True).sqrt())
    return scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    weights = weights.tril()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def bias_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    bias = k[..., 0].exp()[..., None, :].expand_as(scores)
    return (scores + bias.masked_fill(_future(scores), -math.inf)).softmax(-1) @ v


MIXES = (
    softcap,
    filled_and_masked,
    multiplied_by_0,
    without_softmax,
    squared_relu,
    sigmoid,
    keys_in_rows,
    difference,
    distances,
    not_causal,
    gated_keys,
    sink,
    retention,
    linear_attention,
    bias_of_keys,
)


class Layer(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        split = (batch, length, HEADS, hidden // HEADS)
        q, k, v = (
            part.view(split).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed: Tensor = self.mix(q * split[-1] ** -0.5, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class LearnedBias(nn.Module):
    """Softmax attention with a bias learned for each distance, as T5 has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, HEADS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[-2])
        distance = (index[:, None] - index).clamp(0, 7)
        scores = q @ k.mT + self.table(distance).permute(2, 0, 1)
        return scores.masked_fill(_future(scores), -math.inf).softmax(-1) @ v


class Model(nn.Module):
    def __init__(self, make: Callable[[], Mix], layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(make()) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), input_ids[:, 1:].flatten())


def _ids(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCAB, (batch, length))}


@pytest.mark.parametrize("mix", [*MIXES, LearnedBias], ids=lambda mix: mix.__name__)
def test_streams_exactly(mix: Mix) -> None:
    model = Model(LearnedBias if mix is LearnedBias else lambda: mix)
    for batch, chunk_size in ((1, 4), (3, 7), (2, 40)):
        assert_exact_fp64(model, _ids(batch, 23), chunk_size=chunk_size)
        assert_streamed_whole()


@pytest.mark.parametrize(
    "mix", slow_but([softcap], [softcap, keys_in_rows, without_softmax]), ids=lambda m: m.__name__
)
def test_lengths_compile_once(mix: Mix) -> None:
    model = Model(lambda: mix).double()
    compiled = streamed(model, dynamic=True, chunk_size=5)
    for length in (23, 11, 4, 30):
        batch = _ids(2, length)
        assert_same_step(run(model, batch, compiled), run(model, batch))
    assert_streamed_whole()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_no_worse_than_eager(dtype: torch.dtype) -> None:
    def build(seed: int) -> nn.Module:
        return Model(lambda: softcap, seed=seed)

    assert_error_not_larger_than_eager(build, dtype, batch=lambda seed: _ids(2, 37), chunk_size=5)


def test_ids_cut_inside_the_program_stream_as_well() -> None:
    model = Model(lambda: bias_of_keys).double()

    def loss(input_ids: Tensor) -> Tensor:
        x = model.embedding(input_ids[:, :-1])
        for layer in model.layers:
            x = layer(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), input_ids[:, 1:].flatten())

    batch = _ids(2, 23)
    compiled = streamed(loss, chunk_size=5)
    assert_same_step(run(model, batch, compiled), run(model, batch, loss))
    assert_streamed_whole()


def test_compiled_bodies_give_the_same() -> None:
    model = Model(lambda: softcap).double()
    compiled = streamed(model, chunk_size=5, compile_bodies=True)
    batch = _ids(2, 23)
    assert_same_step(run(model, batch, compiled), run(model, batch))
    assert_streamed_whole()


def test_dropout_of_weights_is_the_same_in_forward_and_backward() -> None:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.mT)
        weights = scores.masked_fill(_future(scores), -math.inf).softmax(-1)
        return F.dropout(weights, 0.4) @ v

    model = Model(lambda: mix).double()
    batch = _ids(2, 23)
    for chunk_size in (4, 23):
        compiled = streamed(model, chunk_size=chunk_size)
        torch.manual_seed(3)
        got = run(model, batch, compiled)
        if chunk_size == 4:
            first = got
    assert_streamed_whole()
    assert_same_step(got, first)


@pytest.mark.parametrize(
    "mix",
    [softcap, filled_and_masked, keys_in_rows, gated_keys, sink, retention, bias_of_keys],
    ids=lambda mix: mix.__name__,
)
def test_no_tensor_of_tokens_by_tokens(mix: Mix) -> None:
    model, length = Model(lambda: mix), 512
    compiled, batch = streamed(model, chunk_size=16), _ids(1, length)

    def step() -> None:
        compiled(**batch).backward()

    step()
    assert_streamed_whole()
    assert_no_allocation_of(step, length * length * 4)


@needs_report
def test_scores_that_a_loop_hands_to_another_are_reported() -> None:
    def share(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        return (weights / weights.sum(-2, keepdim=True)) @ v

    assert_exact_fp64(Model(lambda: share), _ids(2, 23), chunk_size=5)
    problems = last_report().problems()
    assert problems and all("one loop makes whole for another" in line for line in problems)

"""Bodies that Inductor compiled give eager's gradients: attention, adapters, dtypes, rules.

Most other tests run bodies op by op. Losses, dropout, written-out attention and whole models
through Inductor are in the test files of that name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend import assert_streamed_whole, streamed
from tests.models import Batch
from tests.oracle import assert_error_not_larger_than_eager, assert_same_step, run

VOCAB = 13
HIDDEN = 8
HEADS = 2
LENGTH = 11
CHUNK = 4

Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _ranges(length: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(length)
    return position[:, None], position[None, :]


def _causal(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _bidirectional(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _window(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    row, column = _ranges(ids.shape[1])
    mask = (column <= row) & (column > row - 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _padded(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    row, column = _ranges(ids.shape[1])
    mask = (column <= row) & (ids > 2)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    row, column = _ranges(ids.shape[1])
    document = (ids < 3).cumsum(-1)
    mask = (document[:, None, :, None] == document[:, None, None, :]) & (column <= row)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _additive(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    bias = (ids[:, None, :, None] - ids[:, None, None, :]).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=0.1 * bias)


def _values_wider_than_keys(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[..., :3], k[..., :3], v, is_causal=True)


def _finite_fill(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    row, column = _ranges(ids.shape[1])
    allowed = (column <= row) & (ids > 2)[:, None, None, :]
    bias = torch.zeros(allowed.shape, dtype=q.dtype)
    bias = bias.masked_fill(~allowed, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


MIXES: dict[str, Mix] = {
    "bidirectional": _bidirectional,
    "window": _window,
    "padded": _padded,
    "documents": _documents,
    "additive": _additive,
    "finite_fill": _finite_fill,
    "values_wider_than_keys": _values_wider_than_keys,
}


class Model(nn.Module):
    """One layer of attention between an embedding and a head; the loss is in ``forward``."""

    def __init__(self, mix: Mix = _causal) -> None:
        super().__init__()
        self.mix = mix
        self.token = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out: nn.Module = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids)
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        x = x + self.out(self.mix(q, k, v, ids).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Adapted(nn.Module):
    """A frozen layer and a product of two narrow matrices beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(HIDDEN, 2, bias=False)
        self.up = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def _batch(seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=draw)
    return {"ids": ids, "labels": torch.randint(VOCAB, (2, LENGTH), generator=draw)}


def _model(seed: int = 0, mix: Mix = _causal) -> Model:
    torch.manual_seed(seed)
    return Model(mix)


def _check(model: nn.Module) -> None:
    model = model.double()
    compiled = streamed(model, chunk_size=CHUNK, compile_bodies=True)
    assert_same_step(run(model, _batch(), compiled), run(model, _batch()))
    assert_streamed_whole()


@pytest.mark.parametrize("mix", MIXES)
def test_attention(mix: str) -> None:
    _check(_model(mix=MIXES[mix]))


def test_adapters_beside_frozen_weights() -> None:
    model = _model().requires_grad_(False)
    model.out = Adapted(model.out)
    _check(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_dtypes(dtype: torch.dtype, autocast: bool) -> None:
    assert_error_not_larger_than_eager(
        _model,
        torch.float32 if autocast else dtype,
        autocast=dtype if autocast else None,
        scale=256.0,
        batch=_batch,
        chunk_size=CHUNK,
        compile_bodies=True,
    )


class EveryRule(nn.Module):
    """Ops of every family of rules but attention's and random ones, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, HIDDEN)
        self.mixed = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids)
        # elementwise, and ones along a dim: reductions and scans
        x = torch.where(x > 0, x * x.sigmoid(), x.clamp(-1, 1).pow(3))
        x = x / (x.abs().amax(-1, keepdim=True) + x.var(-1, keepdim=True) + 1)
        x = x.log_softmax(-1).cumsum(-1) + x.flip(-1)
        # parts and views
        first, second = x.chunk(2, dim=-1)
        x = torch.stack([second, first], dim=-1).permute(0, 1, 3, 2).flatten(2)
        x = torch.cat([x[..., 1:], x[..., :1]], dim=-1)
        # indexing and creation
        picked = x.gather(-1, (ids % HIDDEN)[..., None])
        x = x + picked * F.one_hot(ids % HIDDEN, HIDDEN).to(x.dtype)
        x = x + torch.arange(ids.shape[1], dtype=x.dtype)[:, None] / ids.shape[1]
        # products of matrices, of each head on its own too
        x = torch.einsum("bti,gij->bgtj", x, self.mixed).sum(1)
        # other extents, and sums over the sequence
        logits = self.head(x)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return loss.mean() + x.mean((0, 1)).square().sum()


def test_every_family_of_rules() -> None:
    torch.manual_seed(0)
    _check(EveryRule())

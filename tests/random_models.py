"""Random small causal transformers, described by a `Config` that prints as the code to build it.

To run one again::

    from tests.random_models import Config, check
    check(Config(layers=1, ...))
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.backend import streamed
from tests.models import EXACT
from tests.oracle import assert_same_step, run

VOCAB = 29
LONGEST = 64

NORMS = ("layer", "rms")
PLACES = ("pre", "post", "sandwich")
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
POSITIONS = ("rotary", "learned", "alibi", "none")
ATTENTIONS = ("causal_flag", "bool_mask", "written_out")
LOSSES = ("mean", "sum", "label_smoothing", "z_loss", "class_weights", "token_weights")
SHIFTS = ("slice_logits", "pad_labels", "outside")
DTYPES = ("float64", "float32")


@dataclass(frozen=True)
class Config:
    """One model, one batch and one chunk size. Heads are 4 wide; ``groups`` is the K, V heads."""

    layers: int = 1
    groups: int = 1
    heads_per_group: int = 1
    norm: str = "layer"
    place: str = "pre"
    activation: str = "gelu"
    parallel: bool = False
    bias: bool = True
    tied: bool = False
    positions: str = "learned"
    attention: str = "causal_flag"
    loss: str = "mean"
    shift: str = "slice_logits"
    ignored: float = 0.1
    dtype: str = "float64"
    batch: int = 1
    length: int = 8
    chunk: int = 4
    seed: int = 0


def configs() -> st.SearchStrategy[Config]:
    """Every `Config`; shrinks towards one layer, one head, the plainest of everything."""
    return st.builds(
        Config,
        layers=st.sampled_from((1, 1, 1, 2, 2, 3)),
        groups=st.integers(1, 3),
        heads_per_group=st.integers(1, 2),
        norm=st.sampled_from(NORMS),
        place=st.sampled_from(PLACES),
        activation=st.sampled_from(ACTIVATIONS),
        parallel=st.booleans(),
        bias=st.booleans(),
        tied=st.booleans(),
        positions=st.sampled_from(POSITIONS),
        attention=st.sampled_from(ATTENTIONS),
        loss=st.sampled_from(LOSSES),
        shift=st.sampled_from(SHIFTS),
        ignored=st.sampled_from((0.0, 0.1, 0.7)),
        dtype=st.sampled_from((*DTYPES[:1] * 7, *DTYPES[1:])),
        batch=st.integers(1, 3),
        length=st.integers(2, 40),
        chunk=st.integers(1, 50),
        seed=st.integers(0, 99),
    )


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _norm(config: Config, hidden: int) -> nn.Module:
    return nn.LayerNorm(hidden) if config.norm == "layer" else RMSNorm(hidden)


def _rotate(x: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[batch, heads, sequence, width]``."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.width = 4
        kv = config.groups * self.width
        self.q = nn.Linear(hidden, config.heads_per_group * kv, bias=config.bias)
        self.k = nn.Linear(hidden, kv, bias=config.bias)
        self.v = nn.Linear(hidden, kv, bias=config.bias)
        self.out = nn.Linear(config.heads_per_group * kv, hidden, bias=config.bias)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _bias(self, q: Tensor) -> Tensor:
        """What to add to scores: ALiBi's slopes if chosen, and -inf where a key is hidden."""
        position = torch.arange(q.shape[-2])
        distance = position[None, :] - position[:, None]
        bias = torch.zeros(distance.shape, dtype=q.dtype)
        if self.config.positions == "alibi":
            heads = q.shape[1]
            slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=q.dtype)
            bias = slopes[:, None, None] * distance
        return bias.masked_fill(distance > 0, float("-inf"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        if self.config.positions == "rotary":
            q, k = _rotate(q), _rotate(k)
        repeat = self.config.heads_per_group
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        if self.config.attention == "written_out":
            scores = q @ k.mT / math.sqrt(self.width) + self._bias(q)
            y = torch.softmax(scores, dim=-1) @ v
        elif self.config.positions == "alibi":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias(q))
        elif self.config.attention == "bool_mask":
            position = torch.arange(x.shape[1])
            allowed = position[None, :] <= position[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config, hidden: int) -> None:
        super().__init__()
        self.activation = config.activation
        gates = 2 if config.activation == "swiglu" else 1
        self.up = nn.Linear(hidden, gates * 2 * hidden, bias=config.bias)
        self.down = nn.Linear(2 * hidden, hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(getattr(F, self.activation)(x))


class Layer(nn.Module):
    def __init__(self, config: Config, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config, hidden)
        self.feed_forward = FeedForward(config, hidden)
        self.norms = nn.ModuleList(_norm(config, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        before_1, after_1, before_2, after_2 = self.norms
        if self.config.place == "post":
            if self.config.parallel:
                return after_1(x + self.attention(x) + self.feed_forward(x))
            x = after_1(x + self.attention(x))
            return after_2(x + self.feed_forward(x))
        attention = self.attention(before_1(x))
        if self.config.place == "sandwich":
            attention = after_1(attention)
        y = x if self.config.parallel else x + attention
        feed = self.feed_forward(before_2(y))
        if self.config.place == "sandwich":
            feed = after_2(feed)
        return x + attention + feed


class Model(nn.Module):
    """``forward(ids, labels) -> loss``; unused norms of a layer keep no gradient, as in eager."""

    class_weights: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        hidden = 4 * config.groups * config.heads_per_group
        self.token = nn.Embedding(VOCAB, hidden)
        self.position = nn.Embedding(LONGEST, hidden) if config.positions == "learned" else None
        self.layers = nn.ModuleList(Layer(config, hidden) for _ in range(config.layers))
        self.norm = _norm(config, hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=config.bias)
        if config.tied:
            self.head.weight = self.token.weight
        self.register_buffer("class_weights", torch.rand(VOCAB) + 0.5)

    def forward(self, ids: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        x = self.token(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if self.config.shift == "slice_logits":
            logits, labels = logits[:, :-1], labels[:, 1:]
            token_weights = token_weights[:, 1:]
        elif self.config.shift == "pad_labels":
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return self._loss(logits.flatten(0, 1), labels.flatten(), token_weights.flatten())

    def _loss(self, logits: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        kind = self.config.loss
        if kind == "sum":
            return F.cross_entropy(logits, labels, reduction="sum")
        if kind == "label_smoothing":
            return F.cross_entropy(logits, labels, label_smoothing=0.1)
        if kind == "class_weights":
            return F.cross_entropy(logits, labels, weight=self.class_weights)
        if kind == "token_weights":
            each = F.cross_entropy(logits, labels, reduction="none")
            return (each * token_weights).sum() / token_weights.sum()
        loss = F.cross_entropy(logits, labels)
        if kind == "z_loss":
            loss = loss + 1e-2 * torch.logsumexp(logits, dim=-1).pow(2).mean()
        return loss


def build(config: Config) -> Model:
    """The model of ``config``: weights from its seed, in its dtype, none of them zero."""
    torch.manual_seed(config.seed)
    model = Model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.to(getattr(torch, config.dtype))


def batch(config: Config) -> dict[str, Tensor]:
    """Ids and labels, int64, and token weights in the model's dtype, ``[batch, length]`` each."""
    draw = torch.Generator().manual_seed(config.seed)
    size = (config.batch, config.length)
    ids = torch.randint(VOCAB, size, generator=draw)
    labels = torch.randint(VOCAB, size, generator=draw)
    labels[torch.rand(size, generator=draw) < config.ignored] = -100
    labels[:, 1] = ids[:, 0]  # with no label at all the mean is NaN
    weights = torch.rand(size, generator=draw, dtype=torch.float64) + 0.1
    dtype = getattr(torch, config.dtype)
    return {"ids": ids, "labels": labels, "token_weights": weights.to(dtype)}


def check(config: Config, *, compile_bodies: bool = False) -> None:
    """Fail unless one streamed step of ``config`` equals eager's.

    Float64 agrees to 1e-10 of each gradient; float32 to 1e-4, where a gradient of less than a
    tenth of all is compared relative to that tenth. The bodies of every tenth are lowered: those
    of random models are all different, and lowering takes longer than the step.
    """
    model, data = build(config), batch(config)
    want = run(model, data)
    function = streamed(
        model,
        chunk_size=config.chunk,
        compile_bodies=compile_bodies,
        lowered=config.seed % 10 == 0,
    )
    got = run(model, data, function)
    if config.dtype == "float64":
        assert_same_step(got, want, EXACT)
    else:
        assert_same_step(got, want, 1e-4, floor=0.1)


def script(config: Config) -> str:
    """A script, to be run from the repository's root, that repeats ``check(config)``."""
    return f"from tests.random_models import Config, check\n\ncheck({config!r})\n"

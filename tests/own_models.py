"""Small causal language models written for the tests, in the styles that people write by hand.

Every model is dtype preserving (no upcast of its own), so that float64 comparisons with eager hold
to rounding. All of them compute in ``[batch, sequence, hidden]``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 131
HIDDEN = 32
HEADS = 4
LONGEST = 512


class FusedAttention(nn.Module):
    """Query, key and value from one projection; fused attention with ``is_causal=True``."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class TrilAttention(nn.Module):
    """Softmax attention written out, with a registered lower-triangular buffer."""

    tril: Tensor

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, longest: int = LONGEST) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        q = self.q(x).view(split).transpose(1, 2)
        k = self.k(x).view(split).transpose(1, 2)
        v = self.v(x).view(split).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.tril[:length, :length] == 0, float("-inf"))
        y = torch.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """A pre-norm transformer layer with LayerNorm and a GELU feed-forward."""

    def __init__(self, attention: nn.Module, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = attention
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class LogitsOnly(nn.Module):
    """A language model that returns logits ``[batch, sequence, vocab]`` and knows of no loss."""

    def __init__(
        self,
        layers: int = 2,
        *,
        written_out: bool = False,
        tied: bool = True,
        dropout: float = 0.0,
        vocab: int = VOCAB,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(LONGEST, hidden)
        self.blocks = nn.ModuleList(
            Block(
                TrilAttention(hidden) if written_out else FusedAttention(hidden, dropout=dropout),
                hidden,
                dropout,
            )
            for _ in range(layers)
        )
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.3)  # a tied head of std 1 saturates the loss
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def features(self, ids: Tensor) -> Tensor:
        """The input of the head, ``[batch, sequence, hidden]``."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token(ids) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.features(input_ids))


class NanoGPT(LogitsOnly):
    """``is_causal`` attention, learned positions, tied head, and the loss inside ``forward``."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(input_ids)
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]),
            labels[:, 1:].reshape(-1),
            ignore_index=-100,
        )


class TrilGPT(NanoGPT):
    """As `NanoGPT`, with written-out attention and a head of its own."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers, written_out=True, tied=False)


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    """The next-token loss, computed outside of the model, to be compiled as a whole."""
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (LoRA)."""

    def __init__(self, linear: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        weight = linear.weight
        self.a = nn.Parameter(torch.randn_like(weight[:rank]) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.randn_like(weight[:, :rank]) / math.sqrt(rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * ((x @ self.a.mT) @ self.b.mT)


def add_low_rank(model: nn.Module, *names: str, rank: int = 4) -> nn.Module:
    """Freeze ``model`` and put a `LowRank` in place of each linear layer whose last name matches.

    Raises:
        LookupError: no linear layer has one of ``names``.
    """
    model.requires_grad_(False)
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if name in names and isinstance(child, nn.Linear)
    ]
    if not found:
        raise LookupError(f"no linear layer is called one of {names}")
    for parent, name, child in found:
        setattr(parent, name, LowRank(child, rank))
    return model

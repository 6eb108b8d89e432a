"""Stream a model of your own, with a loss of your own: nothing of it needs to know.

    python examples/custom_module.py --tokens 2048

The module returns its loss, so that the logits of a whole sequence exist nowhere. The loss is
cross entropy with label smoothing and a penalty on the logits' normaliser (z-loss), written out in
plain PyTorch. The gradients are compared with eager's.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.heads, width // self.heads)
        qkv = self.qkv(self.norm_attention(x)).split(width, dim=-1)
        query, key, value = (part.view(heads).transpose(1, 2) for part in qkv)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """A small GPT that returns its training loss."""

    def __init__(
        self,
        vocabulary: int = 512,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        longest: int = 8192,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of ``ids`` and ``targets``, int64 ``[batch, tokens]``; 0-d."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)
        return loss + 1e-4 * logits.logsumexp(-1).square().mean()


def gradients(model: Model, ids: Tensor, targets: Tensor, backend: str) -> dict[str, Tensor]:
    """The gradient of each parameter after one step of a copy of ``model``."""
    model = copy.deepcopy(model)
    torch.compile(model, backend=backend)(ids, targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst_difference(tokens: int, backend: str = "streambp") -> float:
    """The largest relative difference of a parameter's gradient from eager's, in fp64."""
    torch.manual_seed(0)
    model = Model().double()
    ids = torch.randint(0, 512, (1, tokens + 1))
    expected = gradients(model, ids[:, :-1], ids[:, 1:], "eager")
    streamed = gradients(model, ids[:, :-1], ids[:, 1:], backend)
    return max(
        float((streamed[name] - grad).norm() / grad.norm()) for name, grad in expected.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1024)
    tokens = parser.parse_args().tokens
    print(f"worst relative gradient difference from eager: {worst_difference(tokens):.1e}")


if __name__ == "__main__":
    main()

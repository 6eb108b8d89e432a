"""Low-rank adapters, as far as memory is concerned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of low rank: ``W x + up (down x)``.

    Hu et al., LoRA, arXiv:2106.09685, section 4.1; the scale is left out, and dropout.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = base.weight
        self.base = base
        self.down = nn.Parameter(weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(weight.new_empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``[..., in_features]``."""
        base: Tensor = self.base(x)
        return base + F.linear(F.linear(x, self.down), self.up)


def adapt(model: Any, rank: int) -> None:
    """Freeze ``model`` and put adapters on its linear layers, all but the head, in place."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    linear = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]
    with torch.device("meta"):
        for parent, name, child in linear:
            setattr(parent, name, Adapted(child, rank))

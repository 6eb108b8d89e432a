"""The scalar that a training step differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streambp_fx._torch import pytree


class NoLossError(ValueError):
    """The program returns nothing that a backward could start from."""


def loss_of(outputs: Any) -> Tensor | None:
    """The scalar that a training loop differentiates; ``None`` without gradients.

    The output itself, its attribute or item ``loss``, or the first of several.

    Raises:
        NoLossError: there is none.
    """
    if not torch.is_grad_enabled():
        return None
    found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("loss")
    if found is None:
        found = next(iter(pytree.tree_leaves(outputs)), None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found if found.requires_grad else None
    raise NoLossError(
        "the program returns no scalar loss: neither itself, nor as `loss`, nor first of several"
    )

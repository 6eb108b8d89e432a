"""Whether a tensor that a deferred output is computed from is still as it was.

Version counters tell of most changes. Fused optimizers write to parameters without a trace in
them, so their steps are counted here; writes to ``parameter.data`` are counted nowhere, so some
elements are compared.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ._torch import FakeTensor, WeakTensorKeyDictionary

_SAMPLES = 8
"""About how many elements of each dim are compared."""

_steps: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""How often an optimizer has updated a parameter."""


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # what is compiled counts versions
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _steps[parameter] = _steps.get(parameter, 0) + 1


register_optimizer_step_post_hook(_count_step)


@dataclass(frozen=True)
class OperandState:
    """What tells a tensor from the same one after it was changed.

    Its counts of in-place changes and of optimizers' steps, its address, and some of its elements.
    """

    version: int | None
    steps: int
    address: int
    sample: Tensor

    @classmethod
    def of(cls, operand: Any) -> OperandState | None:
        """The state of ``operand`` now; ``None`` for what is no tensor, and for a fake one."""
        if not isinstance(operand, Tensor) or isinstance(operand, FakeTensor):
            return None
        version = None if operand.is_inference() else operand._version
        some = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in operand.shape)
        sample = operand.detach()[some].clone()
        return cls(version, _steps.get(operand, 0), operand.data_ptr(), sample)

    def is_of(self, operand: Tensor) -> bool:
        """Whether ``operand`` is as it was."""
        now = OperandState.of(operand)
        if now is None or (self.version, self.steps) != (now.version, now.steps):
            return False
        same = self.address == now.address and self.sample.shape == now.sample.shape
        return same and torch.allclose(self.sample, now.sample, rtol=0.0, atol=0.0, equal_nan=True)

"""What a plan is made for: the GPU, the dtype, what is trained and what stays resident."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

OBJECTIVES = ("sft", "dpo", "grpo")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZERS = {"none": 0, "momentum": 1, "adamw": 2}
"""States of a parameter's size and dtype that an optimizer keeps for each trained parameter."""
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """A training run, as far as memory is concerned.

    memory_gib, reserve_gib
        Memory of the GPU, and how much of it is not for tensors: the CUDA context, libraries'
        workspaces and what the caching allocator can not use.
    dtype
        Of weights, activations and gradients: a key of `DTYPES`.
    lora_rank
        Rank of adapters on all linear layers but the head, the base frozen; ``None`` trains all
        parameters.
    objective
        ``"sft"``: next-token cross entropy as the model computes it. ``"dpo"``: pairs of chosen
        and rejected completions, two rows each. ``"grpo"``: ``group`` completions of a prompt.
    batch
        Sequences, pairs or groups in a step.
    group
        Completions in a group.
    optimizer
        A key of `OPTIMIZERS`.
    keeps_gradients
        Whether gradients of earlier micro-batches are there when a step starts. Without them, as
        after ``zero_grad()``, gradients come into being as backward runs.
    """

    memory_gib: float = 80.0
    reserve_gib: float = 1.0
    dtype: str = "bf16"
    lora_rank: int | None = None
    objective: str = "sft"
    batch: int = 1
    group: int = 8
    optimizer: str = "none"
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        _one_of("objective", self.objective, OBJECTIVES)
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("optimizer", self.optimizer, tuple(OPTIMIZERS))
        for name in ("batch", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1 or None, got {self.lora_rank}")
        if not math.isfinite(self.memory_gib):
            raise ValueError(f"memory_gib must be a number of GiB, got {self.memory_gib}")
        if not 0 <= self.reserve_gib < self.memory_gib:
            raise ValueError(
                f"the reserve must be at least 0 and less than the memory of {self.memory_gib:g} "
                f"GiB, got {self.reserve_gib:g} GiB (reserve_gib, --reserve)"
            )

    @property
    def budget(self) -> int:
        """Bytes that tensors may take."""
        return int((self.memory_gib - self.reserve_gib) * GIB)

    @property
    def rows(self) -> int:
        """Rows of the batch that goes through the model."""
        return self.batch * {"sft": 1, "dpo": 2, "grpo": self.group}[self.objective]

    @property
    def has_reference(self) -> bool:
        """Whether a second copy of the weights is resident; adapters have their base for that."""
        return self.objective != "sft" and self.lora_rank is None

    def __str__(self) -> str:
        trained = "full" if self.lora_rank is None else f"LoRA of rank {self.lora_rank}"
        what = {"sft": "sequence", "dpo": "pair", "grpo": f"group of {self.group}"}
        return (
            f"{self.objective}, {trained}, {self.dtype}, {self.batch} x {what[self.objective]}, "
            f"{self.memory_gib:g} GiB"
        )


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} is one of {', '.join(accepted)}, got {value!r}")

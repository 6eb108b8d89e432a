"""What a chunk is predicted to take is what its body allocates when it runs on real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from streambp_fx._torch import disable_current_modes
from streambp_fx.explaining.body_memory import CompiledWorkspace, Workspace, eager_workspace
from streambp_fx.explaining.trace import Traced
from streambp_fx.measure import memory_use
from streambp_fx.options import parse_options
from streambp_fx.passes.body import LoopBody
from streambp_fx.passes.lower import CompiledBody
from tests.memory_of import _model

CASE = {"layers": 2, "width": 128, "vocabulary": 1009}
B, T, CHUNK = 2, 350, 100
TOLERANCE = 0.02
ROUNDING = 4096
"""Bytes of scalars and of what the allocator rounds up to, which no prediction counts."""


def _real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


def compared(workspace: Workspace, compiled: bool) -> list[tuple[str, int, int]]:
    """For each kind of chunk of a model: its loop, and predicted and measured bytes."""
    found = []

    def both(body: LoopBody, inputs: Sequence[Any]) -> int:
        predicted = workspace(body, inputs)
        with disable_current_modes(), torch.no_grad():
            call = CompiledBody(body, {}) if compiled else body
            given = [_real(value) for value in inputs]
            call(*given)
            used = memory_use(lambda: call(*given)).peak
        found.append((body.spec.name, predicted, used))
        return used

    with torch.device("meta"):
        model, ids = _model(CASE), torch.zeros(B, T, dtype=torch.int64)
    options = parse_options({"chunk_size": CHUNK, "compile_bodies": False})
    Traced(model, (), {"input_ids": ids, "labels": ids}, options).memory(both)
    return found


def assert_predicted(found: list[tuple[str, int, int]]) -> None:
    assert len(found) > 5
    wrong = [
        f"{loop}: predicted {predicted}, took {used}"
        for loop, predicted, used in found
        if abs(predicted - used) > TOLERANCE * used + ROUNDING
    ]
    assert not wrong, "\n".join(wrong)


def test_chunks_that_run_op_by_op() -> None:
    assert_predicted(compared(eager_workspace, compiled=False))


@pytest.mark.slow
def test_chunks_that_are_compiled() -> None:
    assert_predicted(compared(CompiledWorkspace({}), compiled=True))

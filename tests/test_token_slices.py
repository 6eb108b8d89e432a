"""Losses over a part of the tokens: slices that drop whole chunks at either end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.marks import slow_but
from tests.own_models import LogitsOnly

LENGTH = 21
SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "drop one at the end": lambda x: x[:, :-1],
    "drop one at the start": lambda x: x[:, 1:],
    "drop a chunk at the start": lambda x: x[:, 9:],
    "drop chunks at both ends": lambda x: x[:, 9:-8],
    "keep the last four": lambda x: x[:, -4:],
    "keep the last but one": lambda x: x[:, -6:-1],
    "keep the first three": lambda x: x[:, :3],
    "slice a slice": lambda x: x[:, 2:][:, 5:-1],
}


@needs_report
@pytest.mark.parametrize("chunk", slow_but([4], [1, 4, 8, 64]))
@pytest.mark.parametrize("whole", [False, True], ids=["slice", "slice and whole logits"])
@pytest.mark.parametrize("name", SLICES)
def test_loss_over_a_slice_of_tokens(name: str, whole: bool, chunk: int) -> None:
    """A slice alone is taken before the head; beside the whole logits, it stays after it."""
    torch.manual_seed(0)
    model, ids = LogitsOnly(tied=False).double(), torch.randint(0, 131, (2, LENGTH))
    parameters, part = list(model.parameters()), SLICES[name]

    def loss(ids: Tensor) -> Tensor:
        logits = model(ids)
        found = F.cross_entropy(part(logits).flatten(0, 1), part(ids).flatten())
        return found + logits.logsumexp(-1).mean() if whole else found

    right = torch.autograd.grad(loss(ids), parameters)
    left = torch.autograd.grad(streamed(loss, chunk_size=chunk)(ids), parameters)
    assert_streamed_whole()
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


PADS: dict[str, Callable[[Tensor], Tensor]] = {
    "a dropped token is padded at the end": lambda x: F.pad(x[:, 1:].tanh(), (0, 0, 0, 1)),
    "differences are padded": lambda x: F.pad(x.diff(dim=1), (0, 0, 1, 0)),
    "both ends are padded": lambda x: F.pad(x[:, 3:-3], (0, 0, 3, 3), value=0.5),
    "more is padded than was dropped": lambda x: F.pad(x[:, 2:], (0, 0, 3, -1)),
}


@needs_report
@pytest.mark.parametrize("chunk", slow_but([4], [1, 4, 64]))
@pytest.mark.parametrize("name", PADS)
def test_pads_of_slices(name: str, chunk: int) -> None:
    torch.manual_seed(0)
    model, ids = LogitsOnly(tied=False).double(), torch.randint(0, 131, (2, LENGTH))
    parameters, pad = list(model.parameters()), PADS[name]

    def loss(ids: Tensor) -> Tensor:
        return model.head(pad(model.features(ids))).logsumexp(-1).mean()

    right = torch.autograd.grad(loss(ids), parameters)
    left = torch.autograd.grad(streamed(loss, chunk_size=chunk)(ids), parameters)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


def test_slice_through_inductor() -> None:
    torch.manual_seed(0)
    model, ids = LogitsOnly(tied=False).double(), torch.randint(0, 131, (2, LENGTH))
    parameters = list(model.parameters())

    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids)[:, 9:].flatten(0, 1), ids[:, 9:].flatten())

    right = torch.autograd.grad(loss(ids), parameters)
    compiled = streamed(loss, chunk_size=4, compile_bodies=True)
    left = torch.autograd.grad(compiled(ids), parameters)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


@needs_report
@pytest.mark.parametrize("dynamic", [None, True])
def test_positions_that_are_a_part_of_a_parameter(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = LogitsOnly(tied=False).double()
    positions = torch.nn.Parameter(torch.randn(64, 131, dtype=torch.float64))
    ids = torch.randint(0, 131, (2, LENGTH))
    parameters = [*model.parameters(), positions]

    def loss(ids: Tensor) -> Tensor:
        logits = model(ids) * positions[: ids.shape[1]]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    right = torch.autograd.grad(loss(ids), parameters)
    got = torch.autograd.grad(streamed(loss, dynamic=dynamic, chunk_size=4)(ids), parameters)
    torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)
    assert_streamed_whole()

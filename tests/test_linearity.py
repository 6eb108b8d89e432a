"""A head whose backward is not linear in the tangent keeps two loops, and is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import streambp_fx
from streambp_fx.passes.linearity import is_linear
from tests.backend import last_report, needs_report, streamed


class Clipped(torch.autograd.Function):
    """The identity, whose backward clips the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e-3, 1e-3)


class Rounded(torch.autograd.Function):
    """The identity, whose backward rounds the gradient through another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.dtype).to(grad.dtype), None


@needs_report
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_gradient_that_is_rounded_is_not_scaled_afterwards(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, ids = Model(clip=False), torch.randint(0, 31, (2, 21))

    def loss(ids: Tensor) -> Tensor:
        logits = Rounded.apply(model.head(torch.tanh(model.embed(ids))), dtype)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    parameters = list(model.parameters())
    right = torch.autograd.grad(loss(ids) * 64, parameters)
    left = torch.autograd.grad(streamed(loss, chunk_size=8)(ids) * 64, parameters)
    assert not last_report().head_fused
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


class Model(nn.Module):
    def __init__(self, clip: bool) -> None:
        super().__init__()
        self.embed, self.head, self.clip = nn.Embedding(31, 16), nn.Linear(16, 31), clip

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids))
        logits = self.head(x)
        logits = Clipped.apply(logits) if self.clip else logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.skipif(not hasattr(torch.ops.prims, "fma"), reason="this torch has no fma")
@pytest.mark.parametrize(
    "depends, linear",
    [("ac", True), ("bc", True), ("abc", False), ("a", False), ("c", False), ("ab", False)],
)
def test_product_and_sum(depends: str, linear: bool) -> None:
    graph = torch.fx.Graph()
    nodes = {name: graph.placeholder(name) for name in "abc"}
    for node in nodes.values():
        node.meta["val"] = torch.ones(3)
    product = graph.call_function(torch.ops.prims.fma.default, tuple(nodes.values()))
    product.meta["val"] = torch.ones(3)
    assert is_linear(product, {nodes[name] for name in depends}) is linear


@needs_report
@pytest.mark.parametrize("clip", [False, True])
def test_scaled_loss(clip: bool) -> None:
    torch.manual_seed(0)
    model, ids = Model(clip).double(), torch.randint(0, 31, (2, 21))
    parameters = list(model.parameters())
    right = torch.autograd.grad(model(ids) * 50, parameters)
    left = torch.autograd.grad(streamed(model, chunk_size=8)(ids) * 50, parameters)
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)
    report = streambp_fx.last_report()
    assert report is not None
    assert report.head_fused is not clip

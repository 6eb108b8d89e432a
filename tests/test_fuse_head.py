"""`fuse_head`: where the head's backward may run in its forward loop, and where it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streambp_fx.passes.fuse_head import fuse_head
from tests.backend import streamed
from tests.joint_graphs import Captured, assert_same_results, aten, bodies, capture
from tests.watch import assert_no_allocation_of

BATCH, LENGTH, HIDDEN, VOCAB = 2, 7, 8, 31
PRODUCTS = (aten.mm.default, torch.ops.streambp.accumulate_mm_.default)


def _token_mean(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x * 2, w).flatten(0, 1), labels.flatten())


def _one_element(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return _token_mean(x, w, labels).reshape(1, 1)


def _scaled(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return _token_mean(x, w, labels) * 3 + 1


def _preference(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """As DPO: the gradient of a token depends on the sums over all tokens."""
    each = F.cross_entropy(F.linear(x * 2, w).transpose(1, 2), labels, reduction="none")
    chosen, rejected = each.sum(1).unbind()
    return -F.logsigmoid(chosen - rejected)


def _two_losses(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = _token_mean(x, w, labels)
    return loss, loss.square()


def _per_token(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x * 2, w).transpose(1, 2), labels, reduction="none")


def _captured(program: Callable[..., Any], dtype: torch.dtype = torch.float64) -> Captured:
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, dtype=dtype))
    return capture(program, x, w, torch.randint(0, VOCAB, (BATCH, LENGTH)))


def _is_fused(captured: Captured) -> bool:
    analysis = captured.analyse()
    before = [node.name for node in analysis.joint.graph.nodes]
    kept = fuse_head(analysis.joint, analysis.axes, analysis.segments, analysis.stages)
    after = [node.name for node in analysis.joint.graph.nodes]
    assert (kept is None) == (before == after), "a head that is not fused is left as it was"
    analysis.joint.graph.lint()
    return kept is not None


@pytest.mark.parametrize("program", [_token_mean, _one_element, _scaled])
def test_loss_of_token_means_is_fused(program: Callable[..., Any]) -> None:
    captured = _captured(program)
    assert _is_fused(captured)
    rewritten = captured.rewrite()
    products = [
        (body.spec.name, sum(call.target in PRODUCTS for call in body.plan.calls))
        for body in bodies(rewritten.graph_module)
    ]
    # Logits, the gradients of hidden states and weight; backward only scales.
    assert sum(count for name, count in products if name.startswith("segment")) == 3
    assert sum(count for name, count in products if name.startswith("stage")) == 0
    assert_same_results(rewritten, captured)  # with a tangent that is not 1


@pytest.mark.parametrize("program", [_preference, _two_losses, _per_token])
def test_what_is_not_a_multiple_of_one_tangent_is_not_fused(program: Callable[..., Any]) -> None:
    captured = _captured(program)
    assert not _is_fused(captured)
    assert_same_results(captured.rewrite(), captured)


def test_unit_tangent_would_underflow_in_fp16() -> None:
    assert _is_fused(_captured(_token_mean, torch.bfloat16))
    assert not _is_fused(_captured(_token_mean, torch.float16))


def test_kept_values_are_scaled_for_every_reader_outside() -> None:
    captured = _captured(_token_mean)
    analysis = captured.analyse()
    stages = dict(analysis.stages)
    kept = fuse_head(analysis.joint, analysis.axes, analysis.segments, analysis.stages)
    assert kept is not None
    (tangent,) = analysis.joint.tangents
    last = analysis.segments.count - 1
    inside = {node for node, stage in stages.items() if stage == last}
    assert not any(user in inside for user in tangent.users)
    for node in kept.kept:
        outside = [user for user in node.users if user not in inside]
        assert [user.args for user in outside] == [(node, tangent)]
        assert set(outside) <= set(kept.scaled)


def test_backward_scales_in_place_unless_it_may_run_again() -> None:
    tokens, vocab = 64, 4096
    weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN))
    weight.grad = torch.zeros_like(weight)
    x, labels = torch.randn(1, tokens, HIDDEN), torch.randint(0, vocab, (1, tokens))
    compiled = streamed(_token_mean, head_chunk_size=8)
    compiled(x, weight, labels).backward()
    once = weight.grad.clone()

    assert_no_allocation_of(compiled(x, weight, labels).backward, vocab * HIDDEN * 4)
    loss = compiled(x, weight, labels)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(weight.grad, 4 * once)


class _SplitGradient(torch.autograd.Function):
    """Halves added to a whole; the gradients of the halves are views of the whole's."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, whole: Tensor) -> Tensor:
        return torch.cat([first, second]) + whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return *gradient.split(gradient.shape[0] // 2), gradient


def test_gradients_that_share_memory_are_scaled_once_each() -> None:
    x, labels = torch.randn(1, 21, HIDDEN).double(), torch.randint(0, 32, (1, 21))
    weights = [torch.randn(rows, HIDDEN).double().requires_grad_() for rows in (16, 16, 32)]

    def loss(*parts: Tensor) -> Tensor:
        return _token_mean(x, _SplitGradient.apply(*parts), labels)

    right = torch.autograd.grad(3 * loss(*weights), weights)
    got = torch.autograd.grad(3 * streamed(loss, head_chunk_size=8)(*weights), weights)
    torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-14)

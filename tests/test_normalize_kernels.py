"""`normalize_kernels`: attention that a library call hid is streamed like any other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streambp_fx.passes.axes import ATTENTION, ATTENTION_BACKWARD
from streambp_fx.passes.normalize_kernels import KERNEL, KERNEL_BACKWARD, normalize_kernels
from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.joint_graphs import calls, capture


class Hidden(nn.Module):
    """One block around ``nn.MultiheadAttention``, which calls SDPA out of Dynamo's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@needs_report
@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_multi_head_attention_is_streamed(chunk: int) -> None:
    torch.manual_seed(0)
    model, ids = Hidden().double(), torch.randint(0, 31, (2, 21))
    parameters = list(model.parameters())
    right = torch.autograd.grad(model(ids), parameters)
    left = torch.autograd.grad(streamed(model, chunk_size=chunk)(ids), parameters)
    assert_streamed_whole()
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_kernel_and_its_backward_become_our_op(causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return KERNEL(q, k, v, 0.0, causal)[0].sum()

    graph_module = capture(program, q, k, v).graph_module
    normalize_kernels(graph_module)
    graph = graph_module.graph
    assert not calls(graph, KERNEL) and not calls(graph, KERNEL_BACKWARD)
    (forward,) = calls(graph, ATTENTION)
    (backward,) = calls(graph, ATTENTION_BACKWARD)
    assert forward.args[3:] == (None, None, causal, pytest.approx(8**-0.5), 0.0)
    assert backward.args[-3:] == (causal, pytest.approx(8**-0.5), 0.0)

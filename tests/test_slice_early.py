"""A slice of the logits' rows becomes one of the hidden states, where that is right."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from streambp_fx.passes.slice_early import slice_early

B, T, D, V = 2, 11, 8, 13


class Captured:
    """A backend that runs the Dynamo graph as the pass leaves it."""

    graph: str = ""
    apply: bool = True

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self.apply:
            slice_early(graph_module)
        self.graph = " ".join(
            getattr(node.target, "__name__", str(node.target))
            for node in graph_module.graph.nodes
            if node.op in ("call_function", "call_method")
        )
        return graph_module.forward


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def compared(program: Callable[..., Tensor], *inputs: Tensor) -> str:
    """The calls of ``program`` after the pass; its value and gradients are those of eager."""
    torch.compiler.reset()
    captured = Captured()
    compiled = torch.compile(program, backend=captured, fullgraph=True)
    torch.manual_seed(0)
    want = program(*inputs)
    torch.manual_seed(0)
    got = compiled(*inputs)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    leaves = [one for one in inputs if one.requires_grad]
    for one, other in zip(
        torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    return captured.graph


def loss(rows: Tensor) -> Tensor:
    return torch.logsumexp(rows, -1).square().sum()


MOVED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "linear": (lambda h, w: loss(F.linear(h, w)[:, :-1]), "getitem linear logsumexp square sum"),
    "product": (lambda h, w: loss((h @ w.T)[:, 1:]), "getitem matmul logsumexp square sum"),
    "last dim written out": (
        lambda h, w: loss(F.linear(h, w)[:, :-1, :]),
        "getitem linear logsumexp square sum",
    ),
    "ellipsis": (
        lambda h, w: loss(F.linear(h, w)[..., 2:-1, :]),
        "getitem linear logsumexp square sum",
    ),
    "cast, scale and softcap": (
        lambda h, w: loss((torch.tanh(F.linear(h, w).float() / 3) * 3)[:, :-1].double()),
        "getitem linear float truediv tanh mul double logsumexp square sum",
    ),
    "in place": (
        lambda h, w: loss(F.linear(h, w).div_(2)[:, :-1]),
        "getitem linear div_ logsumexp square sum",
    ),
    "ellipsis of no dim": (
        lambda h, w: loss(F.linear(h, w)[:, 1:, ..., :]),
        "getitem linear logsumexp square sum",
    ),
    "one slice after another": (
        lambda h, w: loss(F.linear(h, w)[:, :-1][:, -4:]),
        "getitem getitem linear logsumexp square sum",
    ),
    "read twice": (
        lambda h, w: loss(F.linear(h, w)[:, :-1]) + F.linear(h, w)[:, :-1].sum(),
        "getitem linear logsumexp square sum getitem linear sum add",
    ),
}


@pytest.mark.parametrize("form", MOVED)
def test_the_slice_comes_first(form: str) -> None:
    program, expected = MOVED[form]
    calls = compared(program, draw(B, T, D), draw(V, D)).replace("iadd", "add")
    assert calls.removeprefix("getattr ") == expected


def _equal_slices(h: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return loss(logits[:, :-1]) + logits[:, :-1].sum()


def test_equal_slices_become_one() -> None:
    calls = compared(_equal_slices, draw(B, T, D), draw(V, D))
    assert calls.count("getitem") == calls.count("linear") == 1


def test_a_sequence_without_a_batch() -> None:
    calls = compared(lambda h, w: loss(F.linear(h, w)[:-1]), draw(T, D), draw(V, D))
    assert calls.startswith("getitem linear")


def test_a_bias_stays_whole() -> None:
    calls = compared(
        lambda h, w, b: loss((F.linear(h, w, b) + b)[:, :-1]), draw(B, T, D), draw(V, D), draw(V)
    )
    assert calls.startswith("getitem linear add")


def _whole_logits_too(h: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return loss(logits[:, :-1]) + logits.mean()


def _two_slices(h: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return loss(logits[:, :-1]) + logits[:, 1:].mean()


def _gradients_off(h: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(h, w)
    with torch.no_grad():
        rows = logits[:, :-1]
    return loss(rows) + h.sum() + w.sum()


def _with_itself(rows: Tensor) -> Tensor:
    return loss(F.linear(rows, rows)[:-1])


class _Centred(torch.autograd.Function):
    """Its gradient mixes tokens, which its forward does not tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient - gradient.mean(1, keepdim=True)


@torch._dynamo.allow_in_graph
def _centred(x: Tensor) -> Tensor:
    return _Centred.apply(x)


@torch._dynamo.allow_in_graph
def _by_length(x: Tensor) -> Tensor:
    return x / x.shape[1]


def _inference(h: Tensor, w: Tensor) -> Tensor:
    with torch.inference_mode():
        F.linear(h, w)[:, :-1].sum()
    return h.sum() + w.sum()


def _into_a_buffer(h: Tensor, w: Tensor) -> Tensor:
    buffer = torch.empty(T, V, dtype=h.dtype)
    with torch.no_grad():
        rows = torch.mm(h[0], w.T, out=buffer)[:-1]
    return h.sum() + w.sum() + rows.sum()


Program = Callable[..., Tensor]
LEFT: dict[str, Program] = {
    "whole logits are read too": _whole_logits_too,
    "two slices": _two_slices,
    "gradients are off for the slice": _gradients_off,
    "inference mode": _inference,
    "entries of the vocabulary": lambda h, w: loss(F.linear(h, w)[:, :, :5]),
    "entries of the vocabulary, by ellipsis": lambda h, w: loss(F.linear(h, w)[..., :5]),
    "entries of the vocabulary, and ellipsis": lambda h, w: loss(F.linear(h, w)[:, :, :5, ...]),
    "sequences": lambda h, w: loss(F.linear(h, w)[1:]),
    "sequences and tokens": lambda h, w: loss(F.linear(h, w)[1:, :-1]),
    "one token": lambda h, w: loss(F.linear(h, w)[:, -1]),
    "no token": lambda h, w: loss(F.linear(h, w)[:, 3:3]) + h.sum() + w.sum(),
    "every second token": lambda h, w: loss(F.linear(h, w)[:, ::2]),
    "tokens by index": lambda h, w: loss(F.linear(h, w)[:, torch.arange(0, T, 2)]),
    "a new dim": lambda h, w: loss(F.linear(h, w)[:, None, :-1]),
    "rows of others are added": lambda h, w: loss((F.linear(h, w) + h.sum(-1, True))[:, :-1]),
    "tokens mix": lambda h, w: loss(F.linear(h, w).cumsum(1)[:, 1:]),
    "tokens mix in backward": lambda h, w: loss(_centred(F.linear(h, w))[:, :-1]),
    "a function of the length": lambda h, w: loss(_by_length(F.linear(h, w))[:, :-1]),
    "no product": lambda h, w: loss((h * 2)[:, :-1]) + w.sum(),
    "a product with itself": lambda h, w: _with_itself(h[0, :, :3]) + w.sum(),
    "a narrow product": lambda h, w: loss(F.linear(h, w[:3])[:, :-1]),
    "a product with a vector": lambda h, w: loss(F.linear(h, w[0])[..., 1:]),
    "a bias for each row": lambda h, w: loss(F.linear(h[0], w, h[:1, :, 0].T.tile(1, V))[:-1]),
    "a buffer": _into_a_buffer,
    "random numbers": lambda h, w: loss(F.dropout(F.linear(h, w), 0.5)[:, :-1]),
    "vmap": lambda h, w: torch.func.vmap(lambda x: loss(F.linear(x, w)[:-1]))(h).sum(),
}


def _calls_of(program: Program) -> str:
    """The calls of ``program`` as Dynamo captures it."""
    torch.compiler.reset()
    captured = Captured()
    captured.apply = False
    torch.compile(program, backend=captured, fullgraph=True)(draw(B, T, D), draw(V, D))
    return captured.graph


@pytest.mark.parametrize("form", LEFT)
def test_other_programs_are_left_alone(form: str) -> None:
    assert compared(LEFT[form], draw(B, T, D), draw(V, D)) == _calls_of(LEFT[form])


def _size_computed_later(h: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return loss(logits[:, : h.shape[1] - 1][:, -(h.shape[1] // 2) :])


def test_sizes_are_computed_first_where_lengths_are_symbolic() -> None:
    torch.compiler.reset()
    captured = Captured()
    compiled = torch.compile(_size_computed_later, backend=captured, dynamic=True)
    for length in (9, 7, 12):
        h, w = draw(B, length, D), draw(V, D)
        torch.testing.assert_close(compiled(h, w), _size_computed_later(h, w))
        assert captured.graph.split().count("getitem") == 2
        assert captured.graph.split()[-4:] == ["linear", "logsumexp", "square", "sum"]


def test_the_slice_keeps_its_source_line() -> None:
    rows = []

    def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        slice_early(graph_module)
        rows.extend(graph_module.graph.find_nodes(op="call_function", target=operator.getitem))
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(_equal_slices, backend=backend)(draw(B, T, D), draw(V, D))
    assert "loss(logits[:, :-1])" in rows[0].meta["stack_trace"]

"""A slice of the logits' rows becomes one of the hidden states, where that is right."""

from __future__ import annotations

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

    def __call__(self, graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
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
    "batch": (lambda h, w: loss(F.linear(h, w)[1:]), "getitem linear logsumexp square sum"),
    "cast, scale and softcap": (
        lambda h, w: loss((torch.tanh(F.linear(h, w).float() / 3) * 3)[:, :-1].double()),
        "getitem linear float truediv tanh mul double logsumexp square sum",
    ),
    "in place": (
        lambda h, w: loss(F.linear(h, w).div_(2)[:, :-1]),
        "getitem linear div_ logsumexp square sum",
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


def _size_known_later(h: Tensor, w: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return loss(logits[:, : h.shape[1] - 1])


LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole logits are read too": _whole_logits_too,
    "two slices": _two_slices,
    "gradients are off for the slice": _gradients_off,
    "entries of the vocabulary": lambda h, w: loss(F.linear(h, w)[:, :, :5]),
    "entries of the vocabulary, by ellipsis": lambda h, w: loss(F.linear(h, w)[..., :5]),
    "one token": lambda h, w: loss(F.linear(h, w)[:, -1]),
    "every second token's": lambda h, w: loss(F.linear(h, w)[:, torch.arange(0, T, 2)]),
    "rows of others are added": lambda h, w: loss((F.linear(h, w) + h.sum(-1, True))[:, :-1]),
    "tokens mix": lambda h, w: loss(F.linear(h, w).cumsum(1)[:, 1:]),
    "no product": lambda h, w: loss((h * 2)[:, :-1]) + w.sum(),
    "random numbers": lambda h, w: loss(F.dropout(F.linear(h, w), 0.5)[:, :-1]),
}


@pytest.mark.parametrize("form", LEFT)
def test_other_programs_are_left_alone(form: str) -> None:
    calls = compared(LEFT[form], draw(B, T, D), draw(V, D))
    assert not calls.startswith("getitem")


@pytest.mark.parametrize("tokens", [7, 12])
def test_a_length_that_becomes_symbolic(tokens: int) -> None:
    torch.compiler.reset()
    captured = Captured()
    compiled = torch.compile(_size_known_later, backend=captured, dynamic=True)
    for length in (9, tokens):
        h, w = draw(B, length, D), draw(V, D)
        torch.testing.assert_close(compiled(h, w), _size_known_later(h, w))

"""Programs that are long chains of calls: no pass needs a deeper stack for a deeper graph."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from streambp_fx.passes.inputs import InputRole
from streambp_fx.passes.lower import loop_nodes
from streambp_fx.passes.mask_algebra import Atom, Linear, at_least_zero, disjunction, unsatisfiable
from streambp_fx.passes.pipeline import History, Settings, stream
from tests.joint_graphs import bodies, forward_graph, run_graph

BATCH, LENGTH, HIDDEN = 2, 11, 8
LINKS = 200
FRAMES = 150
"""Of a pass over a graph, whatever its length; Dynamo and its caller need the others."""


@contextmanager
def _shallow_stack() -> Iterator[None]:
    """Let calls go `FRAMES` deep, and no deeper."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _chain(value: Tensor) -> Tensor:
    for _ in range(LINKS):
        value = value.sin()
    return value


def _weight(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, _chain(w))


def _wide_table(x: Tensor, w: Tensor) -> Tensor:
    """A chain of values as wide as the hidden state, which are computed by chunk."""
    return F.linear(x, w) + _chain(torch.arange(x.shape[1])[:, None] * torch.ones(HIDDEN))


def _narrow_of_wide(x: Tensor, w: Tensor) -> Tensor:
    """A chain of narrow values, the first of which is made from a wide one."""
    wide = torch.arange(x.shape[1])[:, None] * torch.ones(HIDDEN)
    return F.linear(x, w) + _chain(wide.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "program, inside", [(_weight, False), (_wide_table, True), (_narrow_of_wide, True)]
)
def test_a_long_chain_outside_a_loop_streams(
    program: Callable[[Tensor, Tensor], Tensor], inside: bool
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(BATCH, LENGTH, HIDDEN), torch.randn(HIDDEN, HIDDEN)
    module = GraphModule(torch.nn.Module(), forward_graph(program, x, w))
    roles = [InputRole.DATA, InputRole.PARAMETER]
    with _shallow_stack():
        rewritten = stream(module, 1, roles, Settings(3), History())
    assert rewritten is not None and len(loop_nodes(rewritten.graph_module)) == 1
    (body,) = bodies(rewritten.graph_module)
    sines = [call for call in body.plan.calls if call.target is torch.ops.aten.sin.default]
    assert len(sines) == (LINKS if inside else 0)
    (got,) = run_graph(rewritten.graph_module, [x, w])
    torch.testing.assert_close(got, program(x, w))


def test_a_condition_of_many_choices_is_looked_at_in_a_shallow_stack() -> None:
    atoms = [Linear.of(Atom(index)) for index in range(LINKS)]
    outside = [disjunction([at_least_zero(a - 2), at_least_zero(-a - 2)]) for a in atoms]
    with _shallow_stack():
        assert not unsatisfiable(*outside)
        assert unsatisfiable(*outside, at_least_zero(atoms[-1]), at_least_zero(-atoms[-1]))

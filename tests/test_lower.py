"""`lower`: bodies are compiled once, are right for every size, and equal their plans."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.testing import assert_close

from streambp_fx.passes.body import LoopBody
from streambp_fx.passes.loops import Along, LoopSpec, Place, Result, streambp_loop
from streambp_fx.passes.lower import CompiledBody, compile_count, lower
from streambp_fx.passes.placement import FULL
from streambp_fx.passes.run_plan import run_plan
from tests.joint_graphs import bodies
from tests.test_body_plan import BATCH, HIDDEN, linear_plan

pytestmark = pytest.mark.slow

RESULT = Result(Along(0, 1, FULL))


def _body(chunk_size: int = 4, scale: float = 2.0, descending: bool = False) -> LoopBody:
    plan = linear_plan(scale)
    plan.results.append(RESULT)
    spec = LoopSpec(
        Place(0), plan.extents(), tuple(plan.operands), (RESULT,), chunk_size, descending
    )
    return LoopBody(plan, spec, {}, chunk_size)


def _inputs(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, length, HIDDEN), torch.randn(HIDDEN, 4)


def _program(*bodies: LoopBody) -> GraphModule:
    """One loop for each body, over the same operands, and the sum of the results."""
    graph, root = Graph(), torch.nn.Module()
    length, x, w = (graph.placeholder(name) for name in ("length", "x", "w"))
    parts = []
    for index, body in enumerate(bodies):
        setattr(root, f"body{index}", body)
        loop = graph.call_function(streambp_loop, (graph.get_attr(f"body{index}"), length, x, w))
        parts.append(graph.call_function(operator.getitem, (loop, 0)))
    total = parts[0]
    for part in parts[1:]:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, part))
    graph.output((total,))
    return GraphModule(root, graph)


def _lowered(
    *bodies: LoopBody, compile_bodies: bool = True, **settings: Any
) -> tuple[Any, GraphModule]:
    program = _program(*bodies)
    return lower(program, compile_bodies, settings), program


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streambp_fx.passes.lower._compiled", {})


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_compiled_body_equals_its_plan(size: int) -> None:
    body = _body()
    x, w = _inputs(size)
    got = CompiledBody(body, {})(3, size, x, w)
    assert_close(list(got), list(run_plan(body.plan, 3, size, x, w)))


@pytest.mark.parametrize("compile_bodies", [False, True])
def test_lowered_graph_is_boxed_and_right(compile_bodies: bool) -> None:
    run, _ = _lowered(_body(), compile_bodies=compile_bodies)
    x, w = _inputs(7)
    args: list[Any] = [7, x, w]
    (got,) = run(args)
    assert run._boxed_call and not args, "its inputs are freed as they are used"
    assert_close(got, x.view(-1, HIDDEN) @ w * 2)


def test_equal_plans_share_one_compiled_body() -> None:
    # Another chunk size or direction is another loop around the same code.
    run, _ = _lowered(_body(), _body(), _body(chunk_size=3), _body(descending=True))
    before = compile_count.bodies
    x, w = _inputs(8)
    (got,) = run([8, x, w])
    assert compile_count.bodies == before + 1
    assert_close(got, x.view(-1, HIDDEN) @ w * 8)


def test_loops_keep_their_own_chunk_size() -> None:
    _, program = _lowered(_body(), _body(chunk_size=3))
    first, second = bodies(program)
    assert (first.spec.chunk_size, second.spec.chunk_size) == (4, 3)
    assert first.variants is second.variants


def test_other_plans_and_other_settings_are_compiled_apart() -> None:
    x, w = _inputs(8)
    before = compile_count.bodies
    run, _ = _lowered(_body(), _body(scale=3.0))
    (got,) = run([8, x, w])
    assert_close(got, x.view(-1, HIDDEN) @ w * 5)
    assert compile_count.bodies == before + 2
    run, _ = _lowered(_body(), epilogue_fusion=False)
    run([8, x, w])
    assert compile_count.bodies == before + 3


def test_new_lengths_compile_nothing_new() -> None:
    run, _ = _lowered(_body())
    x, w = _inputs(8)
    run([8, x, w])
    before = compile_count.bodies
    for length in (1, 2, 5, 9, 31):
        x, w = _inputs(length)
        (got,) = run([length, x, w])
        assert_close(got, x.view(-1, HIDDEN) @ w * 2)
    assert compile_count.bodies == before


def test_a_size_that_breaks_a_fact_gets_a_variant_of_its_own() -> None:
    compiled = CompiledBody(_body(), {})
    x, w = _inputs(4)
    compiled(0, 4, x, w)
    (variant,) = compiled.variants
    variant.condition = lambda offset, size: size != 3
    before = compile_count.bodies
    y, _ = _inputs(3)
    for _ in range(2):
        (got,) = compiled(0, 3, y, w)
        assert_close(got, y.reshape(-1, HIDDEN) @ w * 2)
    assert (compile_count.bodies, len(compiled.variants)) == (before + 1, 2)
    compiled(0, 4, x, w)
    assert compile_count.bodies == before + 1, "the first variant still serves its sizes"


def test_bodies_run_by_their_plan_where_nothing_is_compiled() -> None:
    before = compile_count.bodies
    _, program = _lowered(_body(), compile_bodies=False)
    assert isinstance(program.body0, LoopBody)
    assert compile_count.bodies == before

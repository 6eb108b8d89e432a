"""`BodyPlan`: identity, what it says of its calls, and what running or tracing it gives."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.fx import Graph, Node
from torch.testing import assert_close

from streambp_fx._torch import FakeTensorMode
from streambp_fx.passes.body import (
    BodyCall,
    BodyPlan,
    LengthArg,
    LoopBody,
    OffsetArg,
    Ref,
    Shape,
    SizeArg,
    along_of,
)
from streambp_fx.passes.extents import ExtentChange
from streambp_fx.passes.loops import Along, LoopSpec, Operand, Place, Result, run_loop
from streambp_fx.passes.placement import FULL, Extent, Streamed
from streambp_fx.passes.rules import call_of, rule_for
from streambp_fx.passes.run_plan import run_plan
from streambp_fx.passes.trace_body import trace_body
from tests.joint_graphs import aten, forward_graph, result, run_graph

BATCH, LENGTH, HIDDEN = 2, 6, 3
MERGED = Streamed(0, outer=BATCH)


def _value(*shape: int, dtype: torch.dtype = torch.float32) -> Node:
    node = Graph().placeholder("value")
    with FakeTensorMode():
        node.meta["val"] = torch.empty(shape, dtype=dtype)
    return node


def _merge_rows() -> BodyCall:
    """``view(x, [B * chunk, d])``, with its rule's way to change the sizes."""
    node = result(
        forward_graph(lambda x: x.view(BATCH * LENGTH, HIDDEN), torch.zeros(BATCH, LENGTH, HIDDEN))
    )
    rule = rule_for(node.target)
    spec = rule(call_of(node)) if rule is not None else None
    assert spec is not None
    (letter,) = (name for name, size in spec.sizes.items() if size == LENGTH)
    shape = Shape((BATCH * LENGTH, HIDDEN), MERGED)
    sizes = [BATCH * LENGTH, HIDDEN]
    return BodyCall(node.target, (Ref("operand", 0), sizes), {}, (shape,), spec.resize, letter)


def linear_plan(scale: float = 2.0, columns: int = 4, symbol: str | None = None) -> BodyPlan:
    """``(x.view(B * chunk, d) @ w) * scale``, with ``x`` by chunk and ``w`` whole."""
    plan = BodyPlan()
    x = plan.add_operand(_value(BATCH, LENGTH, HIDDEN), Streamed(1))
    w = plan.add_operand(_value(HIDDEN, columns), None)
    assert (x, w) == (Ref("operand", 0), Ref("operand", 1))
    shape = Shape((BATCH * LENGTH, columns), MERGED)
    rows = plan.add_call(_merge_rows())
    product = plan.add_call(BodyCall(aten.mm.default, (rows, w), {}, (shape,)))
    factor = scale if symbol is None else SizeArg(sympy.Symbol(symbol))
    plan.outputs.append(plan.add_call(BodyCall(aten.mul.Tensor, (product, factor), {}, (shape,))))
    if symbol is not None:
        size = Graph().placeholder(symbol)
        size.meta["val"] = 7
        plan.add_operand(size, None)
        plan.symbols.append(symbol)
    return plan


def _with_other_call(change: Callable[[BodyCall], BodyCall]) -> BodyPlan:
    plan = linear_plan()
    plan.calls[-1] = change(plan.calls[-1])
    return plan


def test_equal_plans_have_equal_keys() -> None:
    assert linear_plan().key() == linear_plan().key()
    assert hash(linear_plan().key()) == hash(linear_plan().key())
    assert linear_plan(math.nan).key() == linear_plan(math.nan).key()


@pytest.mark.parametrize(
    "other",
    [
        linear_plan(scale=3.0),
        linear_plan(scale=-2.0),
        linear_plan(scale=2),  # an int and a float promote differently
        linear_plan(columns=5),
        linear_plan(symbol="s0"),
        _with_other_call(lambda call: dataclasses.replace(call, target=aten.div.Tensor)),
        _with_other_call(lambda call: dataclasses.replace(call, kwargs={"alpha": 1})),
        _with_other_call(lambda call: dataclasses.replace(call, args=(Ref("call", 0), 2.0))),
        _with_other_call(lambda call: dataclasses.replace(call, letter="t")),
        _with_other_call(
            lambda call: dataclasses.replace(call, change=ExtentChange(0, Extent(0, 1), None))
        ),
    ],
)
def test_other_programs_have_other_keys(other: BodyPlan) -> None:
    assert other.key() != linear_plan().key()


def test_bool_and_int_arguments_differ() -> None:
    one = _with_other_call(lambda call: dataclasses.replace(call, args=(1,)))
    true = _with_other_call(lambda call: dataclasses.replace(call, args=(True,)))
    assert one.key() != true.key()


def test_operands_are_part_of_the_key() -> None:
    plans = []
    for value, at, mutated in [
        (_value(2, 6), None, False),
        (_value(2, 6), None, True),
        (_value(2, 6), Streamed(1), False),
        (_value(2, 6), Streamed(0), False),
        (_value(2, 6, dtype=torch.bfloat16), None, False),
        (_value(2, 7), None, False),
    ]:
        plan = BodyPlan()
        plan.add_operand(value, at, mutated)
        plans.append(plan.key())
    assert len(set(plans)) == len(plans)


def test_extents_start_with_the_full_one() -> None:
    plan = BodyPlan()
    plan.add_operand(_value(2, 5), Streamed(1, extent=Extent(1, 0)))
    shape = Shape((2, 5), Streamed(1, extent=Extent(0, 1)))
    plan.add_call(BodyCall(aten.exp.default, (Ref("operand", 0),), {}, (shape,)))
    assert plan.extents() == (FULL, Extent(0, 1), Extent(1, 0))


def test_values_are_dropped_after_their_last_use() -> None:
    plan = BodyPlan()
    first = plan.add_call(BodyCall(aten.exp.default, (Ref("operand", 0),), {}, ()))
    second = plan.add_call(BodyCall(aten.sin.default, (first,), {}, ()))
    third = plan.add_call(BodyCall(aten.cat.default, ([first, second],), {}, ()))
    plan.add_call(BodyCall(aten.neg.default, (second,), {}, ()))  # nothing reads it
    plan.outputs = [third]
    assert plan.last_uses() == {2: (0,), 3: (1, 3)}


def test_along_needs_a_number_inside_the_axis() -> None:
    assert along_of(Streamed(1, outer=4, inner=3)) == Along(1, 3, FULL)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_run_plan_rebuilds_sizes_for_the_chunk(size: int) -> None:
    x, w = torch.randn(BATCH, size, HIDDEN), torch.randn(HIDDEN, 4)
    (got,) = run_plan(linear_plan(), 2, size, x, w)
    assert_close(got, x.reshape(BATCH * size, HIDDEN) @ w * 2)


def test_run_plan_takes_symbols_last() -> None:
    x, w = torch.randn(BATCH, 3, HIDDEN), torch.randn(HIDDEN, 4)
    (got,) = run_plan(linear_plan(symbol="s0"), 0, 3, x, w, 7)
    assert_close(got, x.reshape(BATCH * 3, HIDDEN) @ w * 7)


def test_run_plan_gives_offset_and_length() -> None:
    plan = BodyPlan()
    device = {"device": torch.device("cpu")}
    start = plan.add_call(BodyCall(aten.full.default, ([1], OffsetArg()), device, ()))
    length = plan.add_call(BodyCall(aten.full.default, ([1], LengthArg()), device, ()))
    plan.outputs = [start, length]
    assert [int(value) for value in run_plan(plan, 5, 3)] == [5, 3]


@pytest.mark.parametrize(
    "fill, source, extent",
    [
        (None, FULL, Extent(0, 1)),
        (None, FULL, Extent(1, 0)),
        (None, Extent(1, 0), Extent(1, 1)),
        (-7.0, Extent(0, 1), FULL),
        (-7.0, Extent(1, 1), Extent(0, 1)),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 6])
def test_chunks_of_slices_and_pads(
    fill: float | None, source: Extent, extent: Extent, size: int
) -> None:
    values = torch.arange(6.0).expand(BATCH, 6)
    given = values[:, source.lo : 6 - source.hi].contiguous()
    wanted = torch.full((BATCH, 6), -7.0)
    wanted[:, source.lo : 6 - source.hi] = given
    wanted = wanted[:, extent.lo : 6 - extent.hi]
    at, to = Streamed(1, extent=source), Streamed(1, extent=extent)
    plan = BodyPlan()
    x = plan.add_operand(_value(*given.shape), at)
    change = ExtentChange(0, extent, fill)
    shape = Shape(tuple(wanted.shape), to)
    plan.outputs.append(
        plan.add_call(BodyCall(aten.exp.default, (x,), {}, (shape,), change=change, source=at))
    )
    spec = LoopSpec(
        Place(0), plan.extents(), (Operand(along_of(at)),), (Result(along_of(to)),), size, False
    )
    (got,) = run_loop(lambda *inputs: run_plan(plan, *inputs), spec, 6, [given])
    assert_close(got, wanted)


def _loop_body(plan: BodyPlan) -> LoopBody:
    spec = LoopSpec(Place(0), plan.extents(), tuple(plan.operands), (), 4, False)
    return LoopBody(plan, spec, {"s0": 7}, 4)


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("symbol", [None, "s0"])
def test_traced_graph_equals_the_plan_for_every_size(size: int, symbol: str | None) -> None:
    plan = linear_plan(symbol=symbol)
    traced, _ = _loop_body(plan).trace()
    inputs: list[Any] = [9, size, torch.randn(BATCH, size, HIDDEN), torch.randn(HIDDEN, 4)]
    if symbol is not None:
        inputs.append(3)
    assert_close(run_graph(traced, inputs), list(run_plan(plan, *inputs)))


def test_traced_sizes_are_symbols_without_guards() -> None:
    traced, mode = trace_body(linear_plan(), 4, {})
    sizes = [n.meta["val"] for n in traced.graph.find_nodes(op="placeholder")][:2]
    assert all(isinstance(size, torch.SymInt) for size in sizes)
    assert mode.shape_env is not None and not mode.shape_env.guards


def test_copies_of_a_graph_share_its_bodies() -> None:
    body = _loop_body(linear_plan())
    assert copy.deepcopy([body])[0] is body
    assert body.key == _loop_body(linear_plan()).key

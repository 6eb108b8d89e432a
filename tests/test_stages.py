"""`assign_stages`: every backward node belongs to one segment, and little crosses between them."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from streambp_fx.passes.axes import Kind
from streambp_fx.passes.dataflow import storage_of
from streambp_fx.passes.stages import owners
from tests.joint_graphs import Analysis, calls
from tests.test_cuts import BATCH, HIDDEN, LENGTH, analysis

BACKWARD = torch.ops.streambp.attention_backward.default


@pytest.fixture(params=[1, 3], name="case")
def _case(request: pytest.FixtureRequest) -> Analysis:
    return analysis(request.param)


def test_every_backward_node_has_a_stage_and_no_other(case: Analysis) -> None:
    backward = {node for node in case.joint.dependent if node.op == "call_function"}
    assert case.stages.keys() == backward
    assert set(case.stages.values()) <= set(range(case.segments.count))


def test_a_node_runs_no_earlier_than_what_it_reads(case: Analysis) -> None:
    # Stages run from last to first.
    for node, stage in case.stages.items():
        for arg in node.all_input_nodes:
            assert case.stages.get(arg, stage) >= stage, f"{node} reads {arg} of a later stage"


def test_reads_interior_values_of_its_own_segment_alone(case: Analysis) -> None:
    owner = owners(case.joint, case.axes, case.segments)
    pinned = 0
    for node, stage in case.stages.items():
        for arg in node.all_input_nodes:
            if arg in owner and case.axes.in_loop(arg):
                pinned += 1
                assert owner[arg] == stage, f"{node} of stage {stage} reads {arg} of {owner[arg]}"
    assert pinned > 10


def test_attention_backward_is_in_the_stage_of_its_layer() -> None:
    case = analysis(3)
    assert [case.stages[node] for node in calls(case.joint.graph, BACKWARD)] == [3, 2, 1]


def test_only_the_residual_gradient_crosses(case: Analysis) -> None:
    # Nothing of the embedding is read in backward, so that its gradient needs no stage of its own.
    for boundary in range(2, case.segments.count):
        crossing: set[Node] = {
            storage_of(node)
            for node, stage in case.stages.items()
            if stage >= boundary
            and case.axes.kind[node] is Kind.STREAMED
            and any(case.stages.get(user, boundary) < boundary for user in node.users)
        }
        (gradient,) = crossing
        assert gradient.meta["val"].numel() == BATCH * LENGTH * HIDDEN


def test_layers_have_equal_stages() -> None:
    case = analysis(3)
    sizes = [sum(stage == index for stage in case.stages.values()) for index in range(5)]
    assert sizes[2] == sizes[3] > 20, sizes

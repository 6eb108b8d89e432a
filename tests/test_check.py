"""`check_rewritten`: a graph that the passes got wrong is refused, whatever is wrong with it."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from streambp_fx.passes.body_builder import RewriteError
from streambp_fx.passes.check import check_rewritten
from streambp_fx.passes.dataflow import JointGraph
from streambp_fx.passes.lower import loop_nodes
from streambp_fx.passes.rewrite import Rewritten
from tests.joint_graphs import capture


def _program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ w).square().sum()


def _rewritten() -> tuple[Rewritten, JointGraph]:
    captured = capture(_program, torch.randn(2, 7, 8), torch.nn.Parameter(torch.randn(8, 5)))
    return captured.rewrite(), captured.analyse().joint


def test_a_right_graph_passes() -> None:
    check_rewritten(*_rewritten())


def test_a_missing_output_is_found() -> None:
    rewritten, joint = _rewritten()
    output = rewritten.graph_module.graph.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]
    with pytest.raises(RewriteError, match="outputs"):
        check_rewritten(rewritten, joint)


def test_an_output_of_another_shape_is_found() -> None:
    rewritten, joint = _rewritten()
    output = rewritten.graph_module.graph.output_node()
    first, *rest = output.args[0]  # type: ignore[misc]
    first.meta["val"] = first.meta["val"].new_empty(3)
    output.args = ((first, *rest),)
    with pytest.raises(RewriteError, match="became"):
        check_rewritten(rewritten, joint)


def test_a_lost_operand_is_found() -> None:
    rewritten, joint = _rewritten()
    loop = loop_nodes(rewritten.graph_module)[0]
    loop.args = loop.args[:-1]
    with pytest.raises(RewriteError, match="operands"):
        check_rewritten(rewritten, joint)


def test_a_result_without_a_fate_is_found() -> None:
    rewritten, joint = _rewritten()
    loop = loop_nodes(rewritten.graph_module)[0]
    body = getattr(rewritten.graph_module, str(loop.args[0].target))  # type: ignore[union-attr]
    lost = replace(body.spec.results[0], along=None, buffer=None)
    body.spec = replace(body.spec, results=(lost, *body.spec.results[1:]))
    with pytest.raises(RewriteError, match="concatenated or a sum"):
        check_rewritten(rewritten, joint)


def test_a_read_before_the_value_exists_is_found() -> None:
    rewritten, joint = _rewritten()
    graph = rewritten.graph_module.graph
    (loop, *_) = loop_nodes(rewritten.graph_module)
    result = next(user for user in loop.users if user.target is operator.getitem)
    loop.prepend(result)
    assert list(graph.nodes).index(result) < list(graph.nodes).index(loop)
    with pytest.raises(RewriteError, match="before it is computed"):
        check_rewritten(rewritten, joint)

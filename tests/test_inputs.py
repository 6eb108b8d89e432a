"""`find_sequence_axes` and `label_tangents`: which dims of inputs and tangents are tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from streambp_fx.passes.dataflow import read_joint
from streambp_fx.passes.inputs import (
    InputRole,
    find_sequence_axes,
    label_tangents,
    read_roles,
)
from streambp_fx.passes.placement import Streamed
from tests.backend import assert_streamed_whole, needs_report, streamed
from tests.joint_graphs import aten, axes_of
from tests.models import make_batch
from tests.own_models import LogitsOnly

B, T, D = 2, 5, 3
IDS = torch.zeros(B, T, dtype=torch.int64)
EMBEDDED = torch.zeros(B, T, D)


def _axis(
    *values: Tensor | int, parameters: int = 0
) -> tuple[int, int, list[Streamed | None]] | None:
    """Length, rows, and each input's position, where the first ``parameters`` are parameters."""
    graph = Graph()
    nodes = [graph.placeholder(f"primals_{index}") for index in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    graph.output(())
    joint = read_joint(graph, 0)
    axes = find_sequence_axes(joint, read_roles(joint, [InputRole.PARAMETER] * parameters))
    if not axes:
        return None
    (found,) = axes
    assert isinstance(found.length, int)
    return found.length, found.batch, [found.inputs.get(node) for node in nodes]


@pytest.mark.parametrize(
    "value, length, batch, dim",
    [
        (IDS, T, B, 1),
        (EMBEDDED, T, B, 1),
        (IDS[0], T, 1, 0),
        (EMBEDDED[0], T, 1, 0),
        (torch.zeros(B, 4, T, D), T, B, 2),
    ],
)
def test_one_input(value: Tensor, length: int, batch: int, dim: int) -> None:
    assert _axis(value) == (length, batch, [Streamed(dim)])


def test_ids_lead_and_others_follow_by_their_size() -> None:
    mask, other = torch.zeros(B, 1, T, T), torch.zeros(B, 9)
    found = _axis(mask, IDS, EMBEDDED, other, IDS[0], torch.tensor(1))
    places = [Streamed(2), Streamed(1), Streamed(1), None, Streamed(0), None]
    assert found == (T, B, places)


def test_batch_as_long_as_the_sequence() -> None:
    assert _axis(torch.zeros(T, T, dtype=torch.int64)) == (T, T, [Streamed(1)])


def test_parameters_have_no_sequence_axis() -> None:
    weight = torch.zeros(T, T)
    assert _axis(weight, IDS, parameters=1) == (T, B, [None, Streamed(1)])
    assert _axis(weight, parameters=1) is None


@pytest.mark.parametrize("value", [IDS[:, :1], torch.tensor(1.0), 7])
def test_nothing_to_stream(value: Tensor | int) -> None:
    assert _axis(value) is None


def prompt_and_completion(model: LogitsOnly, prompt: Tensor, completion: Tensor) -> Tensor:
    logits = model(torch.cat([prompt, completion], 1))[:, prompt.shape[1] - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, completion[..., None])
    return -chosen.mean()


@needs_report
@pytest.mark.parametrize("sizes", [(7, 14), (14, 7)])
def test_the_axis_of_inputs_that_the_program_joins(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = LogitsOnly().double()
    ids = make_batch(3, sum(sizes))["input_ids"]
    parts = ids.split(list(sizes), 1)
    parameters = list(model.parameters())
    want = torch.autograd.grad(prompt_and_completion(model, *parts), parameters)
    function = streamed(partial(prompt_and_completion, model), chunk_size=4)
    got = torch.autograd.grad(function(*parts), parameters)
    assert_streamed_whole()
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)


def test_tangents_get_the_positions_of_their_outputs() -> None:
    # Two outputs of one shape, streamed along different dims, one that needs no gradient between.
    graph = Graph()
    x, y = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    tangents = [graph.placeholder(f"tangents_{index}") for index in (1, 2)]
    square = torch.zeros(B, T, T)
    for node, value in ((x, square), (y, square), (tangents[0], square), (tangents[1], square)):
        node.meta["val"] = value
    outputs = [graph.call_function(aten.exp.default, (node,)) for node in (x, y)]
    count = graph.call_function(aten.sum.default, (x,))
    for node in outputs:
        node.meta["val"] = square
    count.meta["val"] = torch.tensor(0.0)
    graph.output((outputs[0], count, outputs[1]))
    joint = read_joint(graph, 3)
    axes = axes_of(graph, Streamed(1), Streamed(2), None, None, length=T)
    assert label_tangents(joint, axes) == {tangents[0]: Streamed(1), tangents[1]: Streamed(2)}

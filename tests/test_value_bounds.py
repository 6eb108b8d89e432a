"""Bounds that are claimed of a value hold of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streambp_fx.passes.value_bounds import bounds_of
from streambp_fx.passes.writes import Writes

from .test_writes import graph_of

arange = torch.arange

BOUNDED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "positions": (lambda x: arange(3, 9) * 1.0, (3.0, 9.0)),
    "negated": (lambda x: -arange(5).float(), (-5.0, 0.0)),
    "slopes": (lambda x: 1.0 / torch.pow(2, arange(1, 9)), (1 / 512, 0.5)),
    "distance": (
        lambda x: (arange(4)[None, :] - arange(4)[:, None]).abs() * 0.5,
        (-(2.0**62), 2.0**62),
    ),
    "joined": (lambda x: torch.cat([torch.zeros(3), arange(2, 4) - 7.0]).view(-1, 1), (-5.0, 0.0)),
    "booleans": (lambda x: (x > 0) * 3.0, (0.0, 3.0)),
    "bytes of data": (lambda x: x.to(torch.uint8).float(), (0.0, 255.0)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_are_found_and_hold(name: str) -> None:
    program, (least, greatest) = BOUNDED[name]
    x = torch.linspace(-3, 200, 8)
    graph = graph_of(program, x).graph
    (result,) = graph.output_node().args[0]
    bounds = bounds_of(result, Writes(graph))
    assert bounds == pytest.approx((least, greatest))
    values = program(x)
    assert bounds[0] <= values.min() and values.max() <= bounds[1]


UNBOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: x * 0.5,
    "infinity": lambda x: torch.ones(3) * -math.inf,
    "divided by what may be 0": lambda x: 1.0 / arange(3),
    "a power of what may be negative": lambda x: torch.pow(arange(-1, 2).float(), 0.5),
    "overflow": lambda x: torch.pow(10.0, arange(1, 500)).float(),
    "overflow of a narrow dtype": lambda x: (arange(2) * 1e6).half(),
    "filled with data": lambda x: torch.ones(3).mul_(x[0]),
    "written through a view": lambda x: _written(torch.ones(3), x),
    "an unlisted call": lambda x: torch.ones(3).tan(),
    "rounded": lambda x: torch.div(torch.ones(3), 0.25, rounding_mode="floor"),
    "a factor beside": lambda x: torch.add(torch.ones(3), torch.ones(3), alpha=1e9),
    "a factor between": lambda x: torch.add(torch.ones(3), 1e9, torch.ones(3)),
    "bits of another dtype": lambda x: torch.ones(3, dtype=torch.int32).view(torch.float32),
    "part data": lambda x: torch.cat([torch.ones(3), x]),
}


def _written(value: Tensor, x: Tensor) -> Tensor:
    value[0] = x[0]
    return value * 2


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_claimed_of_other_values(name: str) -> None:
    graph = graph_of(UNBOUNDED[name], torch.rand(3)).graph
    (result,) = graph.output_node().args[0]
    assert bounds_of(result, Writes(graph)) is None

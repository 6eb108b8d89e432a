"""Get the loop bodies of a program without running it or allocating its weights.

The program is traced on fake CPU tensors and rewritten as the backend does. Autograd of a torch
build without CUDA can not handle CUDA tensors, not even fake ones; the passes, though, ask no value
for its device, so that a body for a GPU is the CPU's with the devices exchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from streambp_fx.explaining.trace import Traced
from streambp_fx.options import Options
from streambp_fx.passes.body import BodyPlan, LoopBody
from streambp_fx.passes.history import distinct
from streambp_fx.passes.lower import loop_nodes


def capture_bodies(
    program: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> dict[str, LoopBody]:
    """The body of each loop by the loop's name, loops that share one together.

    Args:
        program: a module, or a function of modules and tensors.
        args, kwargs: its arguments. Only shapes, strides and dtypes of tensors matter; those on
            the meta device will do. Modules are copied with fake parameters.
        options: of the backend.

    Loops of a second graph (after a graph break) are called ``graph1.segment0`` and so on.
    """
    bodies: dict[str, LoopBody] = {}
    for index, capture in enumerate(Traced(program, args, kwargs, options).captures):
        for history, numbers in distinct(capture.segments):
            rewritten = history.graphs.get("rewritten")
            for node in loop_nodes(rewritten) if rewritten is not None else ():
                body = getattr(rewritten, str(node.args[0].target))  # type: ignore[union-attr]
                for number in numbers:
                    name = node.meta["loop"].of_later_segment(number - numbers[0]).name
                    bodies[f"graph{index}.{name}" if index else name] = body
    return bodies


def on_device(body: LoopBody, device: torch.device) -> LoopBody:
    """``body`` with every tensor of it on ``device``."""
    moved = copy.copy(body)
    moved.plan = _plan_on_device(body.plan, device)
    moved.key = moved.plan.key()
    return moved


def _plan_on_device(plan: BodyPlan, device: torch.device) -> BodyPlan:
    def move(args: Any) -> Any:
        return map_aggregate(args, lambda arg: device if isinstance(arg, torch.device) else arg)

    return dataclasses.replace(
        plan,
        calls=[
            dataclasses.replace(call, args=move(call.args), kwargs=dict(move(call.kwargs)))
            for call in plan.calls
        ],
        metas=[
            dataclasses.replace(meta, device=None if meta.device is None else device)
            for meta in plan.metas
        ],
    )

"""Trace a `BodyPlan` into a graph whose chunk sizes are symbols.

Given:  calls with open sizes, e.g. ``view(%0, [B, chunk, 8, 64])``
Result: a GraphModule over ``(offset, size, ..., operands)`` where ``size`` is a SymInt

The shape environment is the body's own, so nothing here can add a guard to the user's graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from streambp_fx._torch import (
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    backed_size_oblivious,
    constant_source,
    disable_current_modes,
    make_fx,
)
from streambp_fx.ops.philox import uniform_decomposition

from .body import BodyPlan
from .decompositions import decompositions
from .loops import local_range
from .run_plan import BodySizes, run_plan


def _scatter_computed_number(base: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """A scatter of a number that is computed from sizes, which Inductor takes as a tensor only."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return NotImplemented
    number: Any = value  # which the stub of torch.full takes for a number alone
    source = torch.full(index.shape, number, dtype=base.dtype, device=base.device)
    return base.scatter(dim, index, source)


def _body_decompositions() -> dict[Any, Any]:
    """Ops that are spelled out in bodies, from op overload to the function that does it.

    One of ours, so that Inductor can fuse it, one that Inductor fails at, and again those of the
    joint graph: what a body calls beyond that graph (``arange`` and casts for random numbers) must
    be spelled out too, since Inductor refuses an op that it has a decomposition and no lowering of.
    """
    return {
        **decompositions(),
        torch.ops.streambp.uniform.default: uniform_decomposition,
        torch.ops.aten.scatter.value: _scatter_computed_number,
    }


def trace_body(
    plan: BodyPlan, chunk_hint: int, hints: dict[str, int]
) -> tuple[GraphModule, FakeTensorMode]:
    """The graph of one chunk, and the fake tensor mode that owns its sizes.

    Args:
        plan: what to trace.
        chunk_hint: example chunk length, in tokens.
        hints: example values of the outer symbols.
    """
    with disable_current_modes(), backed_size_oblivious():
        # Every size is a symbol of its own, and 0 and 1 are sizes like others.
        env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        sizes, size_inputs = _symbolic_sizes(env, plan, chunk_hint, hints)
        with FakeTensorMode(shape_env=env) as mode:
            operands = _fake_operands(plan, sizes)
            tracer = make_fx(
                lambda *inputs: run_plan(plan, *inputs), decomposition_table=_body_decompositions()
            )
            graph_module = tracer(*size_inputs, *operands)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module, mode


def _symbolic_sizes(
    env: ShapeEnv, plan: BodyPlan, chunk_hint: int, hints: dict[str, int]
) -> tuple[BodySizes, list[Any]]:
    def symbol(name: str, hint: int) -> Any:
        source = constant_source(name)
        created = env.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        return env.create_symintnode(created, hint=hint, source=source)

    sizes = BodySizes({}, {}, {})
    inputs: list[Any] = []
    extents = plan.extents()
    # An example chunk that sticks out of the narrowest extent by one token.
    start = 2 + max(extent.lo for extent in extents)
    end = start + max(3, chunk_hint)
    length = end + max(0, *(extent.hi - 1 for extent in extents))
    for number, extent in enumerate(extents):
        offset, size = local_range(extent, length, start, end)
        sizes.offset[extent] = symbol(f"offset{number}", offset)
        sizes.size[extent] = symbol(f"size{number}", size)
        inputs += [sizes.offset[extent], sizes.size[extent]]
    for name in plan.symbols:
        sizes.symbols[name] = symbol(name, hints[name])
    return sizes, inputs


def _fake_operands(plan: BodyPlan, sizes: BodySizes) -> list[Any]:
    """Fake tensors with the operands' shapes; chunks are contiguous."""
    operands: list[Any] = []
    for meta in plan.metas[: len(plan.metas) - len(plan.symbols)]:
        shape = sizes.shape(meta.shape, meta.at)
        if meta.stride is None:
            operands.append(torch.empty(shape, dtype=meta.dtype, device=meta.device))
        else:
            stride = [sizes.evaluate(size) for size in meta.stride]
            operands.append(
                torch.empty_strided(shape, stride, dtype=meta.dtype, device=meta.device)
            )
    return [*operands, *sizes.symbols.values()]

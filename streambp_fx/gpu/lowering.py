"""Lower every loop body of a program for a GPU, without one.

Given:  a program and example arguments, on any device
Result: for each distinct body: its Triton kernels, the other ops it calls, the buffers it
        allocates and when they are alive; nothing is compiled or run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch

from streambp_fx._torch import GraphLowering, MultiOutput
from streambp_fx.options import OptionError, parse_options
from streambp_fx.passes.body import BodyPlan, LoopBody
from streambp_fx.passes.lower_only import lower_only

from .capture import capture_bodies, on_device
from .device import pretended_gpu
from .targets import Target, find_target
from .wrapper_code import Buffer, Launch, Tensors, Wrapper, read_wrapper

DEVICE = torch.device("cuda", 0)
MEASURING = ("max_autotune", "max_autotune_gemm")


@dataclass(frozen=True)
class LoweredBody:
    """One loop body as Inductor lowers it for ``target``.

    loops
        The names of the loops that share it, in order.
    sizes
        The sizes that shapes are in terms of, with example values: ``size0`` is the chunk's length
        in tokens, ``offset0`` its first token; other numbers are those of narrower extents.
    wrapper
        The Python source that allocates, launches and calls.
    kernels
        Triton source by name.
    launches, externs
        Kernels launched, with their tensors, and other ops called, in order.
    operands
        The tensors that the body is given: weights, chunks, accumulators, keys and values.
    buffers
        What it allocates, its results among them.
    alive
        The names of the allocated buffers that are alive, as that changes.
    """

    target: Target
    loops: tuple[str, ...]
    sizes: dict[str, int]
    wrapper: str = field(repr=False)
    kernels: dict[str, str] = field(repr=False)
    launches: tuple[Launch, ...] = field(repr=False)
    externs: tuple[str, ...]
    operands: tuple[Buffer, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    alive: tuple[frozenset[str], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the first loop that has this body."""
        return self.loops[0]

    def alive_at_peak(self, **sizes: int) -> tuple[Buffer, ...]:
        """The allocated buffers that are alive when they take the most bytes.

        ``sizes`` are put in place of the example values of `sizes`.
        """
        at = {**self.sizes, **sizes}
        by_name = {buffer.name: buffer for buffer in self.buffers}
        moments = [tuple(by_name[name] for name in sorted(names)) for names in self.alive]
        return max(moments, key=lambda buffers: sum(buffer.nbytes(at) for buffer in buffers))

    def peak_bytes(self, **sizes: int) -> int:
        """The most bytes that the body's own buffers take at a time, beside its operands."""
        at = {**self.sizes, **sizes}
        return sum(buffer.nbytes(at) for buffer in self.alive_at_peak(**sizes))


def lower_for_gpu(
    program: Callable[..., Any],
    *args: Any,
    target: str = "h200",
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[LoweredBody]:
    """Lower each distinct loop body of ``program(*args, **kwargs)``, in the order of the loops.

    Args:
        program: a module, or a function of modules and tensors. It is traced, not run; modules and
            tensors on the meta device will do, and no weight is allocated.
        target: a name of `TARGETS`.
        options: of the backend; see `streambp_fx.options.Options`.

    Raises:
        TritonMissingError: the package ``triton`` is not installed.
        ValueError: there is no such target.
        OptionError: a wrong option, or one that would have kernels timed.
    """
    gpu = find_target(target)
    parsed = parse_options(options)
    measuring = [name for name in MEASURING if parsed.inductor.get(name)]
    if measuring:
        raise OptionError(f"{measuring[0]} chooses kernels by their time, which takes a GPU")
    shared: dict[Any, list[str]] = {}
    bodies = capture_bodies(program, args, kwargs, parsed)
    for name, body in bodies.items():
        shared.setdefault(body.key, []).append(name)
    settings = dict(parsed.inductor)
    with pretended_gpu(gpu):
        return [_lower(bodies[names[0]], tuple(names), gpu, settings) for names in shared.values()]


def write_lowered(bodies: list[LoweredBody], folder: Path) -> list[Path]:
    """Write each body's wrapper and kernels into ``folder``, and return the files.

    ``segment1.py`` is the wrapper of the body of loop ``segment1`` with its kernels in it;
    ``segment1.KERNEL.py`` is a kernel alone; ``segment1.externs.txt`` has a called op a line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    for body in bodies:
        texts[f"{body.name}.py"] = body.wrapper
        texts[f"{body.name}.externs.txt"] = "".join(f"{name}\n" for name in body.externs)
        for name, source in body.kernels.items():
            texts[f"{body.name}.{name}.py"] = source
    paths = []
    for file_name, text in texts.items():
        path = folder / file_name
        path.write_text(text)
        paths.append(path)
    return paths


def _lower(
    body: LoopBody, loops: tuple[str, ...], target: Target, settings: dict[str, Any]
) -> LoweredBody:
    graph, source, inputs = lower_only(on_device(body, DEVICE), settings)
    names = _size_names(body.plan, inputs)
    tensors = _tensors(graph, names)
    wrapper: Wrapper = read_wrapper(source, tensors)
    return LoweredBody(
        target,
        loops,
        {str(names[size.node.expr]): size.node.hint for size in inputs if _is_size(size)},
        source,
        wrapper.kernels,
        wrapper.launches,
        wrapper.externs,
        tuple(tensors.operands.values()),
        wrapper.buffers,
        wrapper.alive,
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _size_names(plan: BodyPlan, inputs: list[Any]) -> dict[sympy.Symbol, sympy.Symbol]:
    """For each symbol of the traced body, one with the name of what it is."""
    roles = [
        f"{role}{number}" for number in range(len(plan.extents())) for role in ("offset", "size")
    ]
    symbols = [value.node.expr for value in inputs if _is_size(value)]
    return {
        symbol: sympy.Symbol(name, integer=True)
        for symbol, name in zip(symbols, [*roles, *plan.symbols], strict=True)
    }


def _tensors(graph: GraphLowering, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Tensors:
    """What Inductor knows of the buffers and operands of a lowered graph."""

    def described(name: str, value: Any) -> Buffer | None:
        # Only a value with a layout of its own is a tensor: some are tuples, or nothing.
        size = value.maybe_get_size()
        if size is None:
            return None
        shape = tuple(sympy.sympify(dim).xreplace(dict(names)) for dim in size)
        return Buffer(name, shape, value.get_dtype())

    def all_of(values: Mapping[str, Any]) -> dict[str, Buffer]:
        found = {name: described(name, value) for name, value in values.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    buffers = all_of(graph.name_to_buffer)
    parts: dict[str, dict[int | None, Buffer]] = {}
    for name, value in graph.name_to_buffer.items():
        if isinstance(value, MultiOutput):
            source: Any = value.inputs[0]  # the op, whose results this is one of
            index = value.indices[-1][1] if value.indices else None
            parts.setdefault(source.get_name(), {})[index] = buffers[name]
    operands = {
        name: value
        for name, value in graph.graph_inputs.items()
        if not isinstance(value, sympy.Expr)
    }
    return Tensors(buffers, all_of(operands), parts)

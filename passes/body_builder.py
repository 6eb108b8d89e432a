"""Build the `BodyPlan` of one loop from the nodes it must produce.

Given:  nodes to produce, all of one phase
Result: a plan in which values made by loops are called for a chunk, values made outside are
        operands (whole, or sliced where the chunk of a call needs a chunk of them), and cheap or
        large values made outside (constants, expands, masks) are computed inside for the chunk,
        so that neither a ``T x V`` constant nor a ``T x T`` mask ever exists
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from .axes import ATTENTION, ATTENTION_BACKWARD, Axes, Kind
from .body import (
    BodyCall,
    BodyPlan,
    Ref,
    Shape,
    SizeArg,
    along_of,
    map_args,
    size_key,
)
from .body_attention import call_attention, call_attention_backward
from .body_symbols import symbols_of
from .loops import Result
from .placement import FULL, Streamed, hint_of, locate, position_of, tensor_inputs, value_of
from .rules import call_of, rule_for
from .rules.sizes import product
from .rules.spec import Letter, Spec

aten = torch.ops.aten
streambp = torch.ops.streambp
WIDE = 96
"""Elements per token from which a value outside loops is computed by chunk, inside them."""
INDEX_SUMS = {aten._unsafe_masked_index_put_accumulate.default, aten.index_put.default}


class RewriteError(RuntimeError):
    """The analysis promised a rewrite that can not be built; the graph is left as it was."""


class Outside(Protocol):
    """What a body builder asks of the graph around the loop."""

    def available(self, node: Node) -> bool:
        """Whether the whole value of ``node`` exists already."""

    def whole(self, node: Node) -> Node:
        """The new graph's node with the whole value of ``node``."""

    def buffer(self, like: Node, zero: bool, dtype: torch.dtype) -> Node:
        """A new buffer with the shape of ``like``'s whole value."""

    def symbol(self, name: str) -> Node:
        """The new graph's node with the size ``name``."""


@dataclass(frozen=True)
class _Way:
    """How the chunk of a value follows from its tensor inputs: a call by a rule.

    ``positions`` are where each input is read by chunk; ``None`` where it is read whole.
    """

    spec: Spec
    letter: Letter
    positions: list[Streamed | None]

    def chunks(self, node: Node) -> list[tuple[Node, Streamed]]:
        """The inputs of ``node`` that are read by chunk, and where."""
        pairs = zip(tensor_inputs(node), self.positions, strict=True)
        return [(source, position) for source, position in pairs if position is not None]


class BodyBuilder:
    """Collects one loop's calls and operands."""

    def __init__(
        self, axes: Axes, outside: Outside, backward: bool, accumulation: torch.dtype | None
    ) -> None:
        self.axes = axes
        self.outside = outside
        self.backward = backward
        self.accumulation = accumulation
        self.plan = BodyPlan()
        self.made: dict[Node, Any] = {}
        self.taken: dict[tuple[Any, ...], Ref] = {}
        self.wide: dict[tuple[Any, ...], bool] = {}

    def build(self, nodes: list[Node], outputs: list[Node]) -> BodyPlan:
        """Call ``nodes`` (topological order) and return ``outputs``."""
        for node in nodes:
            self.made[node] = self._make(node)
        for node in outputs:
            self._add_result(node)
        self._add_symbols()
        return self.plan

    def _add_result(self, node: Node) -> None:
        made = self.made[node]
        if isinstance(made, Result):
            self.plan.results.append(made)
            return
        place = self.axes.position(node)
        if place is None:
            raise RewriteError(f"{node}: a loop's result without a sequence axis")
        self.plan.outputs.append(made)
        self.plan.results.append(Result(along=along_of(place)))

    def _make(self, node: Node) -> Any:
        if node.target is operator.getitem:
            source = self.made[node.args[0]]  # type: ignore[index]
            if isinstance(source, tuple):
                return source[node.args[1]]  # type: ignore[index]
            return self.call(operator.getitem, (source, node.args[1]), node)
        if node.target is ATTENTION:
            return call_attention(self, node)
        if node.target is ATTENTION_BACKWARD:
            return call_attention_backward(self, node)
        step = self.axes.step[node]
        if step.change is not None:
            return self._change_extent(node)
        if step.spec is None or step.letter is None:
            raise RewriteError(f"{node}: no rule was recorded for it")
        if self.axes.kind[node] is Kind.SUM:
            return self._sum(node, step.spec, step.letter)
        args, kwargs = self._arguments(node, step.spec, step.letter)
        return self.plan.add_call(
            BodyCall(node.target, args, kwargs, self._shapes(node), step.spec.resize, step.letter)
        )

    def call(self, target: Any, args: tuple[Any, ...], node: Node | None = None) -> Ref:
        """Call ``target``, whose result has the shape of ``node``'s chunk."""
        shapes = self._shapes(node) if node is not None else ()
        return self.plan.add_call(BodyCall(target, args, {}, shapes))

    def _shapes(self, node: Node) -> tuple[Shape | None, ...]:
        values = value_of(node)
        places = self.axes.place[node]
        values = values if isinstance(values, (tuple, list)) else (values,)
        places = places if len(places) == len(values) else (None,) * len(values)
        return tuple(
            _shape(value, place) if isinstance(value, torch.Tensor) else None
            for value, place in zip(values, places, strict=True)
        )

    def _arguments(
        self, node: Node, spec: Spec, letter: Letter, without_base: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, every tensor replaced by the chunk or the whole it needs.

        ``without_base`` leaves out the first one, the zeros that an accumulating op adds to.
        """
        remaining = iter(spec.inputs)
        extent = self._extent(node)
        base = node.args[0] if without_base else None

        def change(arg: Node) -> Any:
            if not isinstance(value_of(arg), torch.Tensor):
                return self._size_argument(arg)
            dims = next(remaining)
            if arg is base:
                return None
            at = position_of(spec, dims, letter, extent)
            return self.whole(arg) if at is None else self.chunk(arg, at)

        return map_args(node.args, change), map_args(dict(node.kwargs), change)

    def _extent(self, node: Node) -> Any:
        """The part of the sequence that a loop node works on."""
        for place in self.axes.place[node]:
            if place is not None:
                return place.extent
        for source in tensor_inputs(node):
            place = self.axes.position(source)
            if place is not None and self.axes.in_loop(source):
                return place.extent
        for source in tensor_inputs(node):
            place = self.axes.position(source)
            if place is not None:
                return place.extent
        return FULL

    def _size_argument(self, arg: Node) -> Any:
        value = value_of(arg)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return SizeArg(size_key(value))
        if isinstance(value, (int, float, bool)):
            return value
        raise RewriteError(f"{arg}: an argument that is neither a tensor nor a number")

    # Values from outside

    def chunk(self, arg: Node, at: Streamed) -> Ref:
        """The chunk of ``arg`` at position ``at``."""
        # A stack, not recursion: what is computed inside may be a chain of thousands of calls.
        ways: dict[tuple[Any, ...], _Way | None] = {}
        stack = [(arg, at)]
        while (known := self._known(arg, at)) is None:
            node, place = stack[-1]
            key = (node, place.key())
            if self._known(node, place) is not None:
                stack.pop()
            elif key in ways:
                self.taken[key] = self._take(node, place, ways[key])
            else:
                ways[key] = way = self._pulled(node, place)
                stack.extend(reversed(way.chunks(node) if way is not None else []))
        return known

    def _known(self, arg: Node, at: Streamed) -> Ref | None:
        """The chunk of ``arg`` at position ``at``, where the plan has it already."""
        if arg in self.made:
            place = self.axes.position(arg)
            if place is None or not place.matches(at):
                raise RewriteError(f"{arg}: needed along another dim than it is streamed")
            made: Ref = self.made[arg]
            return made
        return self.taken.get((arg, at.key()))

    def _take(self, arg: Node, at: Streamed, way: _Way | None) -> Ref:
        """The chunk of a value from outside, computed the given way or sliced."""
        if way is None:
            return self.plan.add_operand(self.outside.whole(arg), at)
        remaining = iter(way.positions)

        def change(source: Node) -> Any:
            if not isinstance(value_of(source), torch.Tensor):
                return self._size_argument(source)
            position = next(remaining)
            return self.whole(source) if position is None else self.chunk(source, position)

        args = map_args(arg.args, change)
        kwargs = map_args(dict(arg.kwargs), change)
        shapes = (_shape(value_of(arg), at),)
        return self.plan.add_call(
            BodyCall(arg.target, args, kwargs, shapes, way.spec.resize, way.letter)
        )

    def whole(self, arg: Node) -> Ref:
        """All of ``arg``; a constant is made inside."""
        if arg in self.made:
            raise RewriteError(f"{arg}: needed whole by the loop that computes it")
        key = (arg, None)
        if key not in self.taken:
            if _is_scalar_constant(arg):
                self.taken[key] = self.plan.add_call(
                    BodyCall(arg.target, arg.args, dict(arg.kwargs), ())
                )
            else:
                self.taken[key] = self.plan.add_operand(self.outside.whole(arg), None)
        return self.taken[key]

    def _pulled(self, arg: Node, at: Streamed) -> _Way | None:
        """How the chunk of a value from outside is computed in the loop; ``None`` to slice it.

        Constants are computed inside, and what is wide or needs something wide.
        """
        way = None if self.outside.available(arg) else self._way(arg, at)
        if way is None or (way.chunks(arg) and not self._is_wide(arg, at)):
            return None
        return way

    def _way(self, arg: Node, at: Streamed) -> _Way | None:
        """How the chunk at ``at`` of a value from outside follows from its inputs, if it does."""
        if arg.op != "call_function" or arg.target is operator.getitem:
            return None
        rule = rule_for(arg.target)
        spec = rule(call_of(arg)) if rule is not None else None
        dims = spec.outputs[0] if spec is not None and len(spec.outputs) == 1 else None
        if spec is None or dims is None:
            return None
        found = locate(spec, dims, at, at.extent.length(self.axes.length))
        if found is None or found[1] in found[0].whole:
            return None
        spec, letter = found
        return _Way(
            spec, letter, [position_of(spec, dims, letter, at.extent) for dims in spec.inputs]
        )

    def _is_wide(self, arg: Node, at: Streamed) -> bool:
        """Whether making the whole value would make something too large to exist whole."""
        start = (arg, at.key())
        readers: dict[tuple[Any, ...], tuple[Any, ...] | None] = {start: None}
        stack = [(arg, at)]
        while stack:
            node, place = stack.pop()
            key: tuple[Any, ...] | None = (node, place.key())
            if self.wide.get((node, place.key()), self._is_large(node, place)):
                while key is not None:  # what reads it, up to ``arg``, is wide as well
                    self.wide[key], key = True, readers[key]
                return True
            way = None if key in self.wide else self._way(node, place)
            for source, position in way.chunks(node) if way is not None else []:
                if (source, position.key()) not in readers and not self.outside.available(source):
                    readers[source, position.key()] = key
                    stack.append((source, position))
        self.wide.update(dict.fromkeys(readers, False))
        return False

    def _is_large(self, node: Node, at: Streamed) -> bool:
        length = hint_of(at.extent.length(self.axes.length))
        total = hint_of(product(value_of(node).shape))
        return total >= min(WIDE, length // 2) * length

    # Special ops

    def _change_extent(self, node: Node) -> Ref:
        change = self.axes.step[node].change
        sources = tensor_inputs(node)
        if change is None:
            raise RewriteError(f"{node}: no change of extent was recorded for it")
        source = sources[change.source]
        place = self.axes.position(source)
        if place is None:
            raise RewriteError(f"{source}: sliced along a sequence axis it does not have")
        ref = self.chunk(source, place)
        args: list[Any] = [None] * (change.source + 1)
        args[change.source] = ref
        shapes = self._shapes(node)
        return self.plan.add_call(
            BodyCall(node.target, tuple(args), {}, shapes, change=change, source=place)
        )

    def accumulator_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In what a sum over chunks of ``dtype`` is kept."""
        if dtype in (torch.bfloat16, torch.float16):
            return self.accumulation or dtype
        return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64

    def buffer(self, like: Node, zero: bool, dtype: torch.dtype) -> Ref:
        """A buffer as large as the whole value of ``like``, which chunks change in place."""
        return self.plan.add_operand(self.outside.buffer(like, zero, dtype), None, mutated=True)

    def _sum(self, node: Node, spec: Spec, letter: Letter) -> Result:
        """Add the chunk's contribution to an accumulator in place."""
        value = value_of(node)
        dtype = self.accumulator_dtype(value.dtype)
        args, kwargs = self._arguments(node, spec, letter, node.target in INDEX_SUMS)
        accumulator = self.buffer(node, True, dtype)
        if node.target in (aten.mm.default, aten.bmm.default):
            self.call(streambp.accumulate_mm_.default, (accumulator, args[0], args[1]))
        elif node.target in INDEX_SUMS:
            masked = node.target is not aten.index_put.default
            mask, indices, values = args[1:4] if masked else (None, *args[1:3])
            self.call(streambp.accumulate_index_put_.default, (accumulator, mask, indices, values))
        else:
            if node.target in (aten.sum.dim_IntList, aten.sum.default):
                kwargs = {**kwargs, "dtype": dtype}
            part = self.plan.add_call(BodyCall(node.target, args, kwargs, ()))
            self.call(streambp.accumulate_.default, (accumulator, part))
        return Result(buffer=accumulator.index, dtype=None if dtype == value.dtype else value.dtype)

    # Symbols

    def _add_symbols(self) -> None:
        """Pass every outer symbol that some size of the body mentions."""
        for name in symbols_of(self.plan):
            self.plan.add_operand(self.outside.symbol(name), None)
            self.plan.symbols.append(name)


def _shape(value: torch.Tensor, at: Streamed | None) -> Shape:
    return Shape(tuple(size_key(size) for size in value.shape), at)


def _is_scalar_constant(node: Node) -> bool:
    return (
        node.op == "call_function"
        and not node.all_input_nodes
        and node.target in (aten.full.default, aten.scalar_tensor.default)
        and value_of(node).dim() == 0
    )

"""Pass: rebuild the joint graph with loops.

Given:  a joint graph, its axes, segments and stages
Result: a joint graph in which every segment is a forward loop, every stage is (a loop that
        rebuilds keys and values, and) a backward loop, and the rest is glue:

    h1, = streambp_loop(layer, T, h0, W...)                     # ascending
    loss_sum, = streambp_loop(head, T, h1, W_head, labels)
    ...
    dh1, dW_head = streambp_loop(head_backward, T, h1, ...)
    k, v = streambp_loop(layer_keys, T, h0, ...)
    dh0, dW... = streambp_loop(layer_backward, T, h0, k, v, dh1, ...)   # descending

Values of the forward are computed again in the loops of their stage, from the cuts. What depends
on parameters alone (casts and transposes of weights) is made just before the loop that needs it,
once in forward and once in backward, and is never saved.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from streambp_fx._torch import detect_fake_mode

from .axes import Axes, Kind
from .body import BodyPlan, LoopBody, map_args
from .body_builder import BodyBuilder, RewriteError
from .chunk_size import ChunkSizes
from .cuts import Segments
from .dataflow import JointGraph
from .loops import LoopSpec, Place, streambp_loop
from .phases import Need, assign_phases, descends, finished_after_loop, is_tensor, needs
from .placement import hint_of, value_of
from .size_nodes import SizeNodes

aten = torch.ops.aten
FOR_ANY_STRIDES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


KEPT_META = ("val", "stack_trace", "loop", "stack_traces")


@dataclass
class Rewritten:
    """The new joint graph and what is needed to take it apart.

    ``handed_on`` are products of tokens with tokens, of the graph before, that one loop makes whole
    for another.
    """

    graph_module: GraphModule
    forward_nodes: set[Node]
    loops: list[LoopSpec] = field(default_factory=list)
    handed_on: list[Node] = field(default_factory=list)


def rewrite(
    joint: JointGraph,
    axes: Axes,
    segments: Segments,
    stage: dict[Node, int],
    sizes: ChunkSizes,
    accumulation: torch.dtype | None,
    first: int = 0,
    length: int = 0,
) -> Rewritten:
    """Rebuild ``joint`` with loops.

    ``first`` is the number of the first segment, ``length`` which of several lengths is streamed.

    Raises:
        RewriteError: a loop can not be built as the analysis says; nothing was changed.
    """
    rewriter = _Rewriter(joint, axes, segments, stage, sizes, accumulation, first, length)
    return rewriter.run()


class _Rewriter:
    def __init__(
        self,
        joint: JointGraph,
        axes: Axes,
        segments: Segments,
        stage: dict[Node, int],
        sizes: ChunkSizes,
        accumulation: torch.dtype | None,
        first: int,
        length: int,
    ) -> None:
        self.first, self.length = first, length
        self.joint, self.axes, self.segments, self.stage = joint, axes, segments, stage
        self.sizes, self.accumulation = sizes, accumulation
        self.new = Graph()
        self.root = torch.nn.Module()
        self.forward_values: dict[Node, Node] = {}
        self.backward_values: dict[Node, Node] = {}
        self.backward = False
        self.forward_nodes: set[Node] = set()
        self.bodies: dict[tuple[Any, ...], str] = {}
        self.loops: list[LoopSpec] = []
        self.handed_on: list[Node] = []
        self.size_nodes = SizeNodes(self.new)
        self.parameter_only = self._parameter_only()
        values = [value_of(node) for node in (*joint.primals, *joint.tangents)]
        self.fake_mode = detect_fake_mode(values)

    def run(self) -> Rewritten:
        for node in (*self.joint.primals, *self.joint.tangents):
            self._add_placeholder(node)
        for index in range(self.segments.count):
            self._forward_segment(index)
        forward_outputs = map_args(self.joint.forward_outputs, self.whole)
        for node in self.joint.kept:
            self.whole(node)
        self.forward_nodes = set(self.new.nodes)
        self._forget_whole_operands()
        self.backward = True
        for index in range(self.segments.count - 1, -1, -1):
            self._backward_stage(index)
        backward_outputs = map_args(self.joint.backward_outputs, self.whole)
        output = self.new.output((*forward_outputs, *backward_outputs))
        output.meta.update(self.joint.graph.output_node().meta)
        graph_module = GraphModule(self.root, self.new)
        return Rewritten(graph_module, self.forward_nodes, self.loops, self.handed_on)

    def _forget_whole_operands(self) -> None:
        """Let backward rebuild what a forward loop made whole for another loop alone.

        Kept for it would be the keys and values of every layer whose attention is not causal.
        """
        kept = self.segments.cut_values() | set(self.joint.kept) | set(self.joint.forward_outputs)
        views = self.axes.transposed
        for node in list(self.forward_values):
            streamed = self.axes.kind.get(node) is Kind.STREAMED or node in views
            by_loops = all(self.axes.in_loop(user) or user in views for user in node.users)
            if streamed and by_loops and node not in kept:
                del self.forward_values[node]

    def _add_placeholder(self, node: Node) -> None:
        copy = self.new.placeholder(str(node.target))
        copy.meta = dict(node.meta)
        self.forward_values[node] = copy
        self.size_nodes.note(copy)

    def _parameter_only(self) -> set[Node]:
        """Nodes that depend on parameters alone.

        Not on buffers: forward may change one in place, after which it can not be read again.
        """
        found: set[Node] = set()
        for node in self.joint.graph.nodes:
            if node.op == "placeholder":
                if node in self.axes.parameters:
                    found.add(node)
            elif node.op == "call_function" and node not in self.joint.dependent:
                inputs = [arg for arg in node.all_input_nodes if is_tensor(arg)]
                if inputs and all(arg in found for arg in inputs) and not self.axes.in_loop(node):
                    found.add(node)
        return found

    # Segments and stages

    def _forward_segment(self, index: int) -> None:
        own = [node for node in self.segments.flow if self.segments.segment[node] == index]
        chosen = set(own) | self._rebuilt(own)
        nodes = [node for node in self.joint.graph.nodes if node in chosen]
        cut = self.segments.cuts[index] if index < len(self.segments.cuts) else set()
        leaving = (*self.joint.forward_outputs, *self.joint.kept)
        outputs = set(cut) | {node for node in leaving if isinstance(node, Node)}
        self._context(index, nodes, outputs)

    def _backward_stage(self, index: int) -> None:
        own = [node for node, stage in self.stage.items() if stage == index]
        rebuilt = self._rebuilt(own)
        chosen = set(own) | rebuilt
        nodes = [node for node in self.joint.graph.nodes if node in chosen]
        outputs = {node for node in self.joint.backward_outputs if isinstance(node, Node)}
        outputs |= {
            node
            for node in own
            if any(user in self.stage and user not in chosen for user in node.users)
        }
        self._context(index, nodes, outputs)
        for node in own:
            # Finish gradients at once, so that accumulators of one stage alone are alive. Values
            # that no loop feeds are left to the loops that read them, by chunk.
            if node in self.axes.after_loop and is_tensor(node):
                self._try_whole(node)

    def _rebuilt(self, own: list[Node]) -> set[Node]:
        """The forward nodes that ``own`` needs computed (again), back to values that exist."""
        stack = [arg for node in own for arg in node.all_input_nodes]
        found: set[Node] = set()
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node in self.joint.dependent or self.available(node):
                continue
            seen.add(node)
            if self.axes.in_loop(node) or node in self.axes.after_loop:
                found.add(node)
                stack.extend(node.all_input_nodes)
            elif node.op == "call_function" and node not in self.axes.prologue:
                stack.extend(node.all_input_nodes)
        return found

    def _context(self, segment: int, nodes: list[Node], outputs: set[Node]) -> None:
        """Emit the loops of one segment or stage, phase by phase."""
        phase = assign_phases(nodes, self.axes, self.backward, self.joint.dependent)
        last = max((phase[node] for node in nodes if self.axes.in_loop(node)), default=-1)
        for current in range(last + 1):
            produced = [
                node
                for node in nodes
                if self.axes.in_loop(node)
                and phase[node] == current
                and is_tensor(node)
                and self._must_leave(node, phase, outputs)
            ]
            if produced:
                number = current if last else None
                place = Place(self.first + segment, self.backward, number, self.length)
                self._loop(place, nodes, produced)

    def _must_leave(self, node: Node, phase: dict[Node, int], outputs: set[Node]) -> bool:
        """Whether a loop must hand out ``node``: something outside of the loop reads it."""
        if node in outputs:
            return True
        forward_value = node not in self.joint.dependent
        for user in node.users:
            if user not in phase:
                continue
            if not self.axes.in_loop(user):
                return True
            if (node, Need.WHOLE) in needs(user, self.axes, self.backward):
                return True
            later = phase[user] > phase[node]
            if later and (not forward_value or finished_after_loop(node, self.axes)):
                return True
        return False

    def _loop(self, place: Place, nodes: list[Node], produced: list[Node]) -> None:
        """Emit one loop that produces ``produced``."""
        inside = self._inside(nodes, produced)
        builder = BodyBuilder(self.axes, self, self.backward, self.accumulation)
        try:
            plan = builder.build(inside, produced)
        except ValueError as error:
            raise RewriteError(str(error)) from error
        chunk_size = self.sizes.choose(inside)
        spec = LoopSpec(
            place,
            plan.extents(),
            tuple(plan.operands),
            tuple(plan.results),
            chunk_size,
            descends(inside),
            self.sizes.is_head(inside),
        )
        body = self.new.get_attr(self._body_name(plan, spec))
        length = self.size_nodes.size(self.axes.length)
        loop = self.new.call_function(streambp_loop, (body, length, *plan.values))
        loop.meta["stack_trace"] = produced[0].meta.get("stack_trace")
        values = [self._fake(node) for node in produced]
        loop.meta["val"] = tuple(values)
        loop.meta["loop"] = spec
        traces = (node.meta.get("stack_trace") for node in inside)
        loop.meta["stack_traces"] = tuple(dict.fromkeys(traces))
        for index, (node, value) in enumerate(zip(produced, values, strict=True)):
            result = self.new.call_function(operator.getitem, (loop, index))
            result.meta["val"] = value
            self._values()[node] = result
        self.loops.append(spec)
        self.handed_on += [
            node
            for node in produced
            if node in self.axes.columns and all(map(self.axes.in_loop, node.users))
        ]

    def _inside(self, nodes: list[Node], produced: list[Node]) -> list[Node]:
        """The loop nodes that ``produced`` needs, back to what is available."""
        stack = list(produced)
        found: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            stack.extend(
                arg
                for arg in node.all_input_nodes
                if self.axes.in_loop(arg) and not self.available(arg)
            )
        return sorted(found, key=lambda node: self.joint.order[node])

    def _body_name(self, plan: BodyPlan, spec: LoopSpec) -> str:
        """The attribute that holds the loop's body; equal bodies share one."""
        key = (plan.key(), spec.chunk_size, spec.descending)
        if key not in self.bodies:
            hints = {name: hint_of(value_of(self.symbol(name))) for name in plan.symbols}
            chunk = min(spec.chunk_size, max(2, hint_of(self.axes.length)))
            name = f"body_{spec.name}"
            setattr(self.root, name, LoopBody(plan, spec, hints, chunk))
            self.bodies[key] = name
        return self.bodies[key]

    def _fake(self, node: Node) -> torch.Tensor:
        value = value_of(node)
        if self.fake_mode is None:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        with self.fake_mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

    # What bodies ask for

    def _values(self) -> dict[Node, Node]:
        return self.backward_values if self.backward else self.forward_values

    def available(self, node: Node) -> bool:
        """Whether the whole value of ``node`` exists already."""
        return node in self.forward_values or node in self.backward_values

    def whole(self, node: Node) -> Node:
        """The new graph's node with the whole value of ``node``, made with all that it needs."""
        stack = [node]  # not recursion: a program may be a chain of thousands of calls
        while (made := self._existing(node)) is None:
            current = stack.pop()
            if self._existing(current) is not None:
                continue
            if self.axes.in_loop(current):
                raise RewriteError(f"{current}: read before the loop that computes it")
            missing = [arg for arg in current.all_input_nodes if self._existing(arg) is None]
            if missing:
                stack += [current, *reversed(missing)]
            else:
                self._make_whole(current)
        return made

    def _existing(self, node: Node) -> Node | None:
        """The new graph's node with the whole value of ``node``, where it has been made."""
        if self.backward and node in self.backward_values:
            return self.backward_values[node]
        if node in self.forward_values and not (self.backward and self._remake(node)):
            return self.forward_values[node]
        return None

    def _make_whole(self, node: Node) -> None:
        self._values()[node] = self._copy(node)
        if isinstance(value_of(node), (tuple, list)):
            # A tuple can not be saved for backward; its parts can.
            for user in node.users:
                if user.target is operator.getitem:
                    self._values()[user] = self._copy(user)

    def _remake(self, node: Node) -> bool:
        """Whether backward makes a value of forward again rather than keep it."""
        if node.op != "call_function":
            return False
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
        return node in self.parameter_only or not node.all_input_nodes

    def _copy(self, node: Node) -> Node:
        if node.op == "get_attr":
            setattr(
                self.root,
                str(node.target),
                getattr(self.joint.graph.owning_module, str(node.target)),
            )
            copy = self.new.get_attr(str(node.target))
        else:
            args = map_args(node.args, self.whole)
            kwargs = map_args(dict(node.kwargs), self.whole)
            # Loop results are contiguous, which the traced value need not have been.
            target = FOR_ANY_STRIDES.get(node.target, node.target)
            copy = self.new.call_function(target, args, kwargs)
        copy.meta = {name: value for name, value in node.meta.items() if name in KEPT_META}
        return copy

    def _try_whole(self, node: Node) -> None:
        """Make a GLUE value of backward as soon as all it needs exists."""
        stack, seen = [node], set()
        while stack:
            current = stack.pop()
            if current in seen or self.available(current):
                continue
            if self.axes.in_loop(current):
                return
            seen.add(current)
            stack.extend(current.all_input_nodes)
        self.whole(node)

    def buffer(self, like: Node, zero: bool, dtype: torch.dtype) -> Node:
        """A new buffer with the shape of ``like``'s whole value."""
        value = value_of(like)
        shape = [self.size_nodes.size(size) for size in value.shape]
        target = aten.zeros.default if zero else aten.empty.memory_format
        node = self.new.call_function(target, (shape,), {"dtype": dtype, "device": value.device})
        if self.fake_mode is None:
            raise RewriteError("the traced graph has no fake values")
        with self.fake_mode:
            node.meta["val"] = torch.empty(value.shape, dtype=dtype, device=value.device)
        return node

    def symbol(self, name: str) -> Node:
        """The new graph's node with the size called ``name``."""
        return self.size_nodes.symbol(name)

"""Pass: find the streamed axis of every value by forward propagation.

Given:  a normalised joint graph and the inputs' positions of the streamed axis
Result: a `Kind` for every node and, where the axis is known, its `Streamed` position

    h   [B,T,d]   STREAMED Streamed(1)         computed chunk by chunk inside a loop
    dW  [n,d]     SUM                          the sum of per-chunk contributions
    ids [B,T]     GLUE     Streamed(1)         computed once, outside loops; sliced where needed
    W   [n,d]     GLUE     -                   has no streamed axis

A position given to a GLUE value is a label that is always valid (any tensor is the concatenation
of its slices); only a STREAMED value depends on a rule being right. An op without a rule, or one
that mixes positions along the axis, is a barrier: it runs whole, outside loops, and is reported.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch.fx import Graph, Node

from .barrier import Barrier
from .dataflow import VIEWS, bytes_of, dtype_and_shape
from .extents import ExtentChange, extent_change
from .loops import StreamLoop
from .placement import (
    FULL,
    Extent,
    Size,
    Streamed,
    is_ids,
    locate,
    position_of,
    tensor_inputs,
    value_of,
)
from .rules import call_of, rule_for
from .rules.sizes import same_size
from .rules.spec import Letter, Spec
from .token_products import added_row, column_of, row_letter

aten = torch.ops.aten
ATTENTION = torch.ops.streambp.attention.default
ATTENTION_BACKWARD = torch.ops.streambp.attention_backward.default
IOTA = torch.ops.prims.iota.default
TRANSPOSES = (aten.permute.default, aten.transpose.int, aten.t.default)

FEW = 4
"""A part of a sequence is few tokens if the whole has this many times its bytes."""

ANOTHER_LENGTH = "its sequence is not the streamed one (another length)"


class Kind(Enum):
    """How a value is computed."""

    STREAMED = "streamed"
    SUM = "sum"
    GLUE = "glue"


@dataclass
class Step:
    """How one STREAMED or SUM node is called for a chunk.

    ``whole`` are inputs that are streamed too, and needed whole (see `token_products`).
    """

    spec: Spec | None = None
    letter: Letter | None = None
    change: ExtentChange | None = None
    whole: Set[Node] = frozenset()


@dataclass
class Axes:
    """What the pass found.

    ``prologue`` nodes depend on no parameter and no activation; ``after_loop`` nodes are GLUE that
    depends on something computed in a loop. ``widest_part`` has, for each number of tokens that
    slices of activations drop, the slice with the most bytes. ``columns`` has, for a product of
    tokens with tokens, where it runs over the sequence beside its streamed rows; ``transposed`` are
    views of whole values that such a product reads, which are made outside loops.
    """

    length: Size
    parameters: Set[Node] = frozenset()
    dependent: Set[Node] = frozenset()
    kind: dict[Node, Kind] = field(default_factory=dict)
    place: dict[Node, tuple[Streamed | None, ...]] = field(default_factory=dict)
    step: dict[Node, Step] = field(default_factory=dict)
    prologue: set[Node] = field(default_factory=set)
    after_loop: set[Node] = field(default_factory=set)
    barriers: list[Barrier] = field(default_factory=list)
    widest_part: dict[int, Node] = field(default_factory=dict)
    columns: dict[Node, Streamed] = field(default_factory=dict)
    transposed: set[Node] = field(default_factory=set)

    def position(self, node: Node) -> Streamed | None:
        """The position of a single-output node's streamed axis."""
        places = self.place.get(node)
        return places[0] if places else None

    def in_loop(self, node: Node) -> bool:
        """Whether the node is computed inside a loop."""
        return self.kind.get(node, Kind.GLUE) is not Kind.GLUE

    def attends(self, node: Node) -> bool:
        """Whether the node is where tokens first meet other tokens: attention, or its scores."""
        if node.target is ATTENTION:
            return True
        if node not in self.columns or node.target in VIEWS:
            return False
        return not any(arg in self.columns for arg in node.all_input_nodes)


def find_axes(
    graph: Graph,
    length: Size,
    inputs: dict[Node, Streamed],
    parameters: set[Node],
    whole: Set[Node] = frozenset(),
    dependent: Set[Node] = frozenset(),
) -> Axes:
    """Propagate the streamed axis from ``inputs`` through ``graph``.

    Args:
        graph: the normalised joint graph.
        length: the length of the streamed axis, in tokens.
        inputs: placeholders (data and tangents) that carry the axis.
        parameters: placeholders that are parameters; what depends on none of them, nor on
            floating data, is the prologue (masks, positions, labels) and never a barrier.
        whole: nodes that are to run outside loops, pointwise in their first argument.
        dependent: nodes that depend on a tangent. They come last, so that the rows of a product
            of gradients follow those of the forward values it meets.
    """
    axes = Axes(length, parameters, dependent)
    for node in sorted(graph.nodes, key=dependent.__contains__):
        if node.op == "placeholder":
            axes.kind[node] = Kind.GLUE
            axes.place[node] = (inputs.get(node),)
            value = value_of(node)
            is_activation = (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and inputs.get(node) is not None
                and value.dim() >= 3
            )
            if node not in parameters and not is_activation:
                axes.prologue.add(node)
        elif node.op == "call_function":
            if node in whole:
                axes.kind[node] = Kind.GLUE
                axes.place[node] = axes.place[node.args[0]]
            else:
                _visit(axes, node)
            if axes.kind[node] is Kind.GLUE and any(
                axes.in_loop(arg) or arg in axes.after_loop for arg in node.all_input_nodes
            ):
                axes.after_loop.add(node)
        elif node.op == "get_attr":
            axes.kind[node] = Kind.GLUE
            axes.prologue.add(node)
    return axes


def _visit(axes: Axes, node: Node) -> None:
    axes.kind[node] = Kind.GLUE
    axes.place[node] = (None,)
    if all(arg in axes.prologue for arg in node.all_input_nodes):
        axes.prologue.add(node)
    if node.target is IOTA:
        if same_size(value_of(node).shape[0], axes.length):
            axes.place[node] = (Streamed(0),)
        return
    if node.target is operator.getitem:
        _visit_getitem(axes, node)
        return
    if isinstance(node.target, StreamLoop):
        # It is over another length, and takes its operands whole.
        return
    sources = tensor_inputs(node)
    live = [axes.position(source) if source in axes.place else None for source in sources]
    prologue = node in axes.prologue
    if not prologue and any(source not in axes.prologue for source in sources):
        # Labels of prologue values are hints; they are aligned by index where they meet
        # activations, so a label shift may not clash with the activations' extent.
        streamed_activation = any(
            place is not None and source not in axes.prologue
            for place, source in zip(live, sources, strict=True)
        )
        if streamed_activation:
            live = [
                None if source in axes.prologue else place
                for place, source in zip(live, sources, strict=True)
            ]
        else:
            live = [None if place is None else _anchored(axes, place) for place in live]
    if not any(place is not None for place in live):
        if prologue and is_ids(node, axes.length):
            axes.place[node] = (Streamed(1),)
        if node.target is ATTENTION and not prologue:
            _barrier(axes, node, live, ANOTHER_LENGTH)
        return
    if node.target in (ATTENTION, ATTENTION_BACKWARD):
        _visit_attention(axes, node)
        return
    changed = extent_change(node, live)
    if changed is not None:
        place, change = changed
        axes.place[node] = (place,)
        if not prologue:
            axes.kind[node] = Kind.STREAMED
            axes.step[node] = Step(change=change)
            _note_part(axes, node, place)
        return
    reason = _apply_rule(axes, node, live, prologue)
    if reason is not None and not (
        prologue or _takes_few_tokens(node) or _pads_a_gradient(axes, node)
    ):
        _barrier(axes, node, live, reason)


def _takes_few_tokens(node: Node) -> bool:
    """Whether a part of the sequence is read that is small beside it, as the last token is.

    The part is made once outside loops, as it would be anyhow; nothing is lost that could stream.
    """
    if node.target not in (aten.select.int, aten.slice.Tensor):
        return False
    return bytes_of(node) * FEW <= bytes_of(tensor_inputs(node)[0])


def _pads_a_gradient(axes: Axes, node: Node) -> bool:
    """Whether the gradient of a part of a parameter (``positions[:T]``) becomes the parameter's.

    It is a result of the program, scaled at most, and whole whatever the loops do.
    """
    if node.target not in (aten.slice_scatter.default, aten.constant_pad_nd.default):
        return False
    readers = [reader for user in node.users for reader in (user.users or (user,))]
    if any(reader.op != "output" for reader in readers):
        return False
    return dtype_and_shape(node) in map(dtype_and_shape, axes.parameters)


def _note_part(axes: Axes, node: Node, place: Streamed) -> None:
    dropped = place.extent.lo + place.extent.hi
    widest = axes.widest_part.setdefault(dropped, node)
    if bytes_of(node) > bytes_of(widest):
        axes.widest_part[dropped] = node


def _anchored(axes: Axes, place: Streamed) -> Streamed:
    """``place``, which labels alone suggest, moved onto the activations of the same length.

    The gradient of ``(token_losses * mask[:, 1:]).sum()`` meets the mask first, whose label says
    that it lacks the first token, and then the logits, which lack the last.
    """
    widest = axes.widest_part.get(place.extent.lo + place.extent.hi)
    at = None if widest is None else axes.position(widest)
    return place if at is None else replace(place, extent=at.extent)


def _apply_rule(axes: Axes, node: Node, live: list[Streamed | None], prologue: bool) -> str | None:
    """Place ``node`` by its rule; return why that is impossible, or ``None``."""
    rule = rule_for(node.target)
    if rule is None:
        return "no rule for this op"
    spec = rule(call_of(node))
    if spec is None:
        return "the op's rule does not cover this call"
    sources = tensor_inputs(node)
    letters: dict[Letter, Extent] = {}
    carried: dict[int, Letter] = {}
    for index, place in enumerate(live):
        if place is None:
            continue
        found = locate(spec, spec.inputs[index], place, place.extent.length(axes.length))
        if found is None:
            return "the op splits or reinterprets the sequence axis"
        spec, letter = found
        carried[index] = letter
        if letters.setdefault(letter, place.extent) != place.extent:
            return "its inputs cover different parts of the sequence (a shift between tokens)"
    whole: set[Node] = set()
    extent = next(iter(letters.values()), FULL)
    if len(letters) == 2 and not prologue and set(letters.values()) == {extent}:
        row = row_letter(axes, node, spec, sources, carried, extent)
        whole = {sources[index] for index in carried if carried[index] != row}
        if row is None or any(
            sources[index] in whole for index in carried if carried[index] == row
        ):
            return "it needs a product of tokens with tokens along both of its dims"
        letters = {row: extent}
        for source in whole:
            _view_outside(axes, source)
    elif len(letters) == 1 and not prologue:
        row = added_row(axes, node, spec, next(iter(letters)), extent)
        if row is not None:
            whole, letters = {sources[index] for index in carried}, {row: extent}
    if len(letters) != 1:
        return "two dims of its result run over the sequence"
    (letter,) = letters
    if letter in spec.whole:
        return "the op mixes tokens"
    places = tuple(
        None if dims is None else position_of(spec, dims, letter, extent) for dims in spec.outputs
    )
    if letter in spec.sums:
        if not prologue:
            axes.kind[node] = Kind.SUM
            axes.step[node] = Step(spec, letter, whole=whole)
            axes.place[node] = (column_of(axes, spec, sources, carried, letter, extent),)
        return None
    if any(
        place is None for place, dims in zip(places, spec.outputs, strict=True) if dims is not None
    ):
        return "one of its results has no sequence axis"
    axes.place[node] = places
    if not prologue:
        axes.kind[node] = Kind.STREAMED
        axes.step[node] = Step(spec, letter, whole=whole)
        column = column_of(axes, spec, sources, carried, letter, extent)
        if column is not None:
            axes.columns[node] = column
    return None


def _view_outside(axes: Axes, node: Node) -> None:
    """Make a transpose that is needed whole a view of the whole value, outside loops."""
    if axes.kind[node] is Kind.STREAMED and node.target in TRANSPOSES:
        axes.kind[node] = Kind.GLUE
        del axes.step[node]
        axes.after_loop.add(node)
        axes.transposed.add(node)


def _barrier(axes: Axes, node: Node, live: list[Streamed | None], reason: str) -> None:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        for place in live:
            # Any label is valid for a whole value; the axis most likely stayed where it was.
            if (
                place is not None
                and place.dim < value.dim()
                and same_size(place.outer, 1)
                and same_size(place.inner, 1)
                and same_size(value.shape[place.dim], place.extent.length(axes.length))
            ):
                axes.place[node] = (place,)
    size = bytes_of(node) if isinstance(value, torch.Tensor) else 0
    _add_barrier(axes, node, reason, size)


def _add_barrier(axes: Axes, node: Node, reason: str, size: int = 0) -> None:
    axes.barriers.append(Barrier.at(node, reason, size, backward=node in axes.dependent))


def _visit_getitem(axes: Axes, node: Node) -> None:
    source, index = node.args
    places = axes.place.get(source, (None,))  # type: ignore[arg-type]
    if isinstance(index, int) and index < len(places):
        axes.place[node] = (places[index],)
    axes.kind[node] = axes.kind[source]  # type: ignore[index]
    if source in axes.prologue:
        axes.prologue.add(node)


def attention_arguments(node: Node) -> dict[str, object]:
    """The arguments of `streambp::attention` or its backward, by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _visit_attention(axes: Axes, node: Node) -> None:
    """Query rows are streamed; keys and values are needed as past (causal) or whole."""
    arguments = attention_arguments(node)
    rows = ["query"] if node.target is ATTENTION else ["query", "grad_out", "out", "logsumexp"]
    expected = Streamed(2)
    for name in [*rows, "key", "value"]:
        source = arguments[name]
        place = axes.position(source) if isinstance(source, Node) else None
        if place is None or not place.matches(expected):
            reason = f"the sequence axis of {name} is not its third dim, in full"
            _add_barrier(axes, node, reason)
            return
        if name in ("key", "value") and source in axes.columns:
            reason = f"its {name} is a product of tokens with tokens, which it needs whole"
            _add_barrier(axes, node, reason, bytes_of(source))
    count = 2 if node.target is ATTENTION else 3
    axes.kind[node] = Kind.STREAMED
    axes.place[node] = tuple(Streamed(2, 1, 1, FULL) for _ in range(count))
    axes.step[node] = Step()

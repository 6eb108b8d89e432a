"""Pass: split a training step's Dynamo graph at its waists, into segments.

Given:  h0 = embed(ids); mask = ...; h1 = layer(h0, mask, W1); h2 = layer(h1, mask, W2)
        loss = head(h2, labels, W)
Result: h0 = segment_1(ids, W0)
        h1 = segment_2(h0, W1)          # with mask = ... inside
        h2 = segment_3(h1, W2)          # the same graph
        loss = segment_4(h2, labels, W)

Each segment becomes an autograd node of its own, and the autograd engine connects them.

What depends on no parameter is computed by the segment that reads it, or, where several do, once
before them. Masks, and all else with two dims of tokens, are computed in each segment that reads
them: there it is proven what they mask, so that none of them is ever built.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from .dataflow import ancestors
from .delay_wide import delay_wide_values
from .dynamo_calls import example_of
from .flow import ATTENTION, Flow, read_flow
from .mode_regions import copied_in_modes
from .rules.spec import Size
from .value_bytes import bytes_alive
from .waists import find_waists

PROLOGUE = 0


@dataclass(frozen=True)
class Chain:
    """A module that calls segments.

    widest
        Bytes of the widest value within one of them.
    attended
        The length and the rows of each call of attention.
    """

    graph_module: GraphModule
    widest: int
    attended: tuple[tuple[Size, Size], ...]


def split_segments(graph_module: GraphModule, notes: list[str]) -> Chain | None:
    """The segments of ``graph_module``; ``None`` if it has no waist. ``notes`` are told why not.

    ``graph_module`` is left as it is. Submodules are called ``submod_0`` (what is computed once,
    before all segments, if anything is), ``submod_1`` and so on; each returns a tuple.
    """
    flow = read_flow(graph_module.graph)
    flow.put_in_order(delay_wide_values(flow))
    waists = find_waists(flow, notes)
    if not waists:
        return None
    segment = _number(flow, waists)
    graph, part = _arranged(flow, segment)
    arranged = GraphModule(graph_module, graph)
    chain = split_module(arranged, arranged, lambda node: part[node], keep_original_order=True)
    for call in chain.graph.find_nodes(op="call_module"):
        _return_tuple(getattr(chain, str(call.target)), call)
    chain.recompile()
    widest = max(bytes_alive([node]) for node in flow.calls if not flow.is_square(node))
    queries = [
        example_of(node.all_input_nodes[0]).shape
        for node in flow.graph.find_nodes(op="call_function", target=ATTENTION)
    ]
    return Chain(chain, widest, tuple((shape[2], shape[0]) for shape in queries))


def _return_tuple(segment: GraphModule, call: Node) -> None:
    """Let ``segment`` return a tuple, if it returned its only value."""
    output = segment.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        output.args = ((results,),)
        segment.recompile()
        with call.graph.inserting_after(call):
            first = call.graph.call_function(operator.getitem, (call, 0))
        call.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)


def _number(flow: Flow, waists: list[int]) -> dict[Node, int]:
    """The segment of each call, counted from 1."""
    segment = {}
    current = 1
    cuts = set(waists)
    for position, node in enumerate(flow.calls):
        segment[node] = current
        current += position in cuts
    return segment


def _arranged(flow: Flow, segment: dict[Node, int]) -> tuple[Graph, dict[Node, int]]:
    """The graph with each prologue value where it is needed, and the part that each node is in."""
    graph = Graph()
    part: dict[Node, int] = {}
    inputs = (node for node in flow.graph.nodes if node.op in ("placeholder", "get_attr"))
    made = {node: graph.node_copy(node) for node in inputs}
    reads = _reads(flow, segment)
    shared = _shared(flow, reads)

    def emit(nodes: Sequence[Node], number: int, into: dict[Node, Node]) -> None:
        for copy in copied_in_modes(graph, nodes, flow.modes, into):
            part[copy] = number

    emit([node for node in flow.prologue if node in shared], PROLOGUE, made)
    for number, read in reads.items():
        here = dict(made)
        own = _own(flow, read, shared)
        calls = [node for node in flow.calls if segment[node] == number]
        emit([*(node for node in flow.prologue if node in own), *calls], number, here)
        made.update({node: here[node] for node in (*calls, *read) if node not in made})
    graph.node_copy(flow.graph.output_node(), made.__getitem__)
    return graph, part


def _reads(flow: Flow, segment: dict[Node, int]) -> dict[int, set[Node]]:
    """For each segment, the prologue values that its calls read; outputs go with the last one."""
    prologue = set(flow.prologue)
    reads: dict[int, set[Node]] = {number: set() for number in sorted(set(segment.values()))}
    for node, number in segment.items():
        reads[number].update(prologue.intersection(node.all_input_nodes))
    reads[max(reads)].update(prologue.intersection(flow.graph.output_node().all_input_nodes))
    return reads


def _shared(flow: Flow, reads: dict[int, set[Node]]) -> set[Node]:
    """The prologue values that are computed once, since several segments need them."""
    prologue, made_where_read = set(flow.prologue), flow.is_made_where_it_is_read
    count: Counter[Node] = Counter()
    for read in reads.values():
        stack = [node for node in read if not made_where_read(node)]
        needed = set(stack)
        while stack:
            for one in stack.pop().all_input_nodes:
                if one in prologue and one not in needed and not made_where_read(one):
                    needed.add(one)
                    stack.append(one)
        count.update(needed)
    return ancestors(node for node in count if count[node] > 1) & prologue


def _own(flow: Flow, read: Set[Node], shared: Set[Node]) -> set[Node]:
    """The prologue values that a segment that reads ``read`` computes for itself."""
    own: set[Node] = set()
    stack = [node for node in read if node not in shared or flow.is_made_where_it_is_read(node)]
    while stack:
        node = stack.pop()
        if flow.is_made_where_it_is_read(node):
            # All of it, from the inputs on.
            own |= ancestors([node])
        elif node not in own:
            own.add(node)
            stack += [one for one in node.all_input_nodes if one not in shared]
    return own.intersection(flow.prologue)

"""Invariants of a rewritten graph, checked after the passes.

A violation is a fault of the passes, not of the user's program: the graph is left unstreamed, with
the reason in the report.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .body_builder import RewriteError
from .dataflow import JointGraph, dtype_and_shape
from .loops import StreamLoop
from .placement import value_of
from .rewrite import Rewritten


def check_rewritten(rewritten: Rewritten, joint: JointGraph) -> None:
    """Check the structure of ``rewritten``, and that its outputs are like those of ``joint``.

    Raises:
        RewriteError: an output has another dtype or shape, a loop does not fit its spec, or a
            node is used before it is defined.
    """
    graph = rewritten.graph_module.graph
    defined: set[Node] = set()
    for node in graph.nodes:
        late = [arg for arg in node.all_input_nodes if arg not in defined]
        if late:
            raise RewriteError(f"{node} reads {late[0]} before it is computed")
        defined.add(node)
    before = [*joint.forward_outputs, *joint.backward_outputs]
    after = list(graph.output_node().args[0])  # type: ignore[arg-type]
    if len(before) != len(after):
        raise RewriteError(f"{len(after)} outputs where the traced graph has {len(before)}")
    for old, new in zip(before, after, strict=True):
        if _description(old) != _description(new):
            raise RewriteError(f"{old}: {_description(old)} became {_description(new)}")
    for node in graph.nodes:
        if isinstance(node.target, StreamLoop):
            _check_loop(rewritten, node)


def _description(output: object) -> Any:
    """Dtype and shape of a tensor output; the output itself if it is a constant."""
    if not isinstance(output, Node):
        return output
    return dtype_and_shape(output) or type(value_of(output))


def _check_loop(rewritten: Rewritten, node: Node) -> None:
    body, _, *operands = node.args
    spec = getattr(rewritten.graph_module, str(body.target)).spec  # type: ignore[union-attr]
    if len(operands) != len(spec.operands):
        raise RewriteError(f"{node}: {len(operands)} operands for {len(spec.operands)}")
    results = value_of(node)
    if len(results) != len(spec.results):
        raise RewriteError(f"{node}: {len(results)} results for {len(spec.results)}")
    for result in spec.results:
        if (result.along is None) == (result.buffer is None):
            raise RewriteError(f"{node}: a result is either concatenated or a sum")

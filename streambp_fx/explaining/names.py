"""Names that a reader knows for the values of forward and backward graphs.

AOTAutograd numbers the inputs of a graph (``primals_5``) in the order in which Dynamo names them
after where the program holds them (``l_model_modules_lm_head_parameters_weight_``); it returns
gradients in the same order. So a loop's operand can be called ``lm_head.weight`` or
``permute(lm_head.weight)``, and a sum over chunks ``gradient of lm_head.weight``. A value that the
program computes and assigns, as in ``cos = cos.unsqueeze(1)``, has the name of its variable.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from ..passes.dataflow import descendants, is_tangent
from ..passes.loops import StreamLoop
from ..passes.pipeline import History
from ..passes.placement import source_of
from .units import code_of, line_of

_INPUT = re.compile(r"(?:primals_(?P<primal>\d+)|arg(?P<arg>\d+)_1)$")
_PARTS = re.compile(r"_(?:modules|parameters|buffers)_")
_ASSIGNMENT = re.compile(r"(?P<variable>\w+) = (?P<value>.+)")


@dataclass
class Names:
    """The names of one graph's nodes, and the parameters that its loops' results are gradients of.

    gradients
        By the name of the node that takes the result from its loop.
    """

    nodes: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)

    def of(self, node: Node) -> str:
        """What a reader calls ``node``."""
        return self.nodes.get(node.name, node.name)

    def with_line(self, node: Node) -> str:
        """What a reader calls ``node``; without such a name, also the line that it comes from."""
        name, line = self.of(node), line_of(source_of(node))
        return f"{name} ({line[0]}:{line[1]})" if name == node.name and line else name


def readable_names(history: History) -> dict[str, Names]:
    """The names for the ``forward`` and the ``backward`` graph, those of them that there are."""
    inputs = _input_names(history)
    found: dict[str, Names] = {}
    known: Mapping[str, str] = inputs
    for graph_name in ("forward", "backward"):
        graph_module = history.graphs.get(graph_name)
        if graph_module is not None:
            found[graph_name] = Names(_node_names(graph_module, known))
            known = found[graph_name].nodes  # what forward saved keeps its name in backward
    if "backward" in found:
        _name_gradients(history, found, list(inputs.values()))
    return found


def _input_names(history: History) -> dict[str, str]:
    """What the program calls each input, by the name in the traced graphs."""
    captured = history.graphs.get("captured")
    forward = history.graphs.get("forward")
    if captured is None or forward is None:
        return {}
    given = [_spoken(node.name) for node in captured.graph.find_nodes(op="placeholder")]
    style = "arg{}_1" if any(_is_arg(node) for node in _placeholders(forward)) else "primals_{}"
    first = 0 if style.startswith("arg") else 1
    return {style.format(index + first): name for index, name in enumerate(given)}


def _placeholders(graph_module: GraphModule) -> list[Node]:
    return list(graph_module.graph.find_nodes(op="placeholder"))


def _is_arg(node: Node) -> bool:
    match = _INPUT.match(node.name)
    return match is not None and match["arg"] is not None


def _spoken(name: str) -> str:
    """``layers.0.norm.weight`` for Dynamo's name of an input."""
    owner, *parts = _PARTS.split(name.rstrip("_"))
    if parts:
        return ".".join(parts)
    return re.sub(r"^l_(?:args_\d+_|kwargs_)?", "", owner, flags=re.IGNORECASE)


def _node_names(graph_module: GraphModule, known: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    placeholders = _placeholders(graph_module)
    tangents = [node for node in placeholders if is_tangent(node)]
    # The line of a gradient is that of the value, whose name it must not have.
    gradients = descendants(graph_module.graph, tangents)
    assigned: set[str | None] = set()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            names[node.name] = known.get(node.name, node.name)
        elif _is_result(node):
            names[node.name] = f"{node.args[0].meta['loop'].name}[{node.args[1]}]"
        elif node.op == "call_function":
            name = _applied(node, names)
            if name is None and node not in gradients:
                name = _assigned(node)
                # The variable of one layer is not that of another one.
                name = None if name in assigned else name
                assigned.add(name)
            if name is not None:
                names[node.name] = name
    return names


def _applied(node: Node, names: Mapping[str, str]) -> str | None:
    """``op(name)`` of the only input; two transposes in a row are none, many ops say little."""
    inputs = node.all_input_nodes
    name = names.get(inputs[0].name) if len(inputs) == 1 else None
    if name is None:
        return None
    op = _op_name(node)
    if op == "permute" and name.startswith("permute(") and name.endswith(")"):
        return name.removeprefix("permute(")[:-1]
    return None if name.count("(") == 2 else f"{op}({name})"


def _assigned(node: Node) -> str | None:
    """``cos`` for what ``cos = cos.unsqueeze(1)`` makes."""
    source = source_of(node)
    found = _ASSIGNMENT.match(code_of(source))
    if found is None or f"{_op_name(node)}(" not in found["value"]:
        return None
    # The variable is what the last op of the line makes.
    later = (user for user in node.users if not isinstance(user.target, StreamLoop))
    return None if any(source_of(user) == source for user in later) else found["variable"]


def _op_name(node: Node) -> str:
    return getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))


def _is_result(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0].target, StreamLoop)  # type: ignore[union-attr]


def _name_gradients(history: History, found: dict[str, Names], inputs: list[str]) -> None:
    """Follow each gradient that backward returns to the loop that summed it."""
    forward, backward = history.graphs["forward"], history.graphs["backward"]
    saved = {node.name: node for node in forward.graph.nodes}
    outputs = backward.graph.output_node().args[0]
    for name, output in zip(inputs, outputs, strict=False):  # type: ignore[arg-type]
        graph_name, node = "backward", output
        while isinstance(node, Node) and not _is_result(node):
            if node.op == "placeholder":
                graph_name, node = "forward", saved.get(node.name)
                if node is not None and node.op == "placeholder":
                    break
            else:
                node = next(iter(node.all_input_nodes), None)
        if isinstance(node, Node) and _is_result(node):
            found[graph_name].gradients.setdefault(node.name, name)

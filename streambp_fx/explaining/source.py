"""Write a graph with loops as Python that runs on its own.

Given:  a graph of the passes' history
Result: a module's text; ``Program().forward(*inputs)`` does what the graph does

Loop bodies are written below each other as functions of one chunk, with the chunk's offset and size
first; what drives them is `streambp_fx.passes.loops.run_loop`.
"""

from __future__ import annotations

import re
import textwrap
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from streambp_fx._torch import FakeTensor

from ..passes.body import LoopBody

_HEADER = '''\
"""{title}"""

from math import inf, nan

import torch
from torch import device

import streambp_fx.ops  # registers torch.ops.streambp
from streambp_fx.passes.loops import Along, LoopSpec, Operand, Place, Result
from streambp_fx.passes.placement import Extent
'''
_LOOP_HEADER = """

class Body:
    \"\"\"The body of a loop: what runs for one chunk, and how the loop passes things to it.\"\"\"

    def __init__(self, run, spec):
        self.run, self.spec = run, spec

    def __call__(self, *inputs):
        return self.run(*inputs)
"""
_CALL = """
    def __call__(self, *inputs):
        return self.forward(*inputs)"""
_IN_HEADER = {"torch", "device", "inf", "nan"}


def to_python(graph_module: GraphModule, title: str = "One graph of streambp.") -> str:
    """The text of a Python module that runs the graph.

    Raises:
        ValueError: the graph calls something, or holds a constant, that can not be written.
    """
    imports: dict[str, str] = {}
    parts: list[str] = []
    program = _class(graph_module, "Program", imports, parts)
    extra = "".join(f"{line}\n" for line in imports.values())
    header = _HEADER.format(title=title) + extra
    if any(part.startswith("def run_") for part in parts):
        header += _LOOP_HEADER
    return header + "".join(f"\n\n{part}\n" for part in (*parts, program))


def _class(graph_module: GraphModule, name: str, imports: dict[str, str], parts: list[str]) -> str:
    """The text of a class with the graph as ``forward``; what it needs is added to ``parts``."""
    attributes: list[str] = []
    nodes = graph_module.graph.nodes
    held = (str(node.target) for node in nodes if node.op in ("get_attr", "call_module"))
    for attribute in dict.fromkeys(held):
        value = getattr(graph_module, attribute)
        if isinstance(value, LoopBody):
            parts.append(_function(value.trace()[0], f"run_{attribute}", imports))
            attributes.append(f"{attribute} = Body(run_{attribute}, {value.spec!r})")
        elif isinstance(value, GraphModule):
            called = f"{name}_{attribute}"
            parts.append(f"{_class(value, called, imports, parts)}\n{_CALL}")
            attributes.append(f"{attribute} = {called}()")
        else:
            attributes.append(f"{attribute} = {_constant(attribute, value)}")
    method = _code(graph_module, imports)
    body = textwrap.indent("\n".join([*attributes, "", method] if attributes else [method]), "    ")
    return f"class {name}:\n{body}"


def _function(graph_module: GraphModule, name: str, imports: dict[str, str]) -> str:
    if graph_module.graph.find_nodes(op="get_attr"):
        raise ValueError(f"the body {name} holds a constant, which a function can not")
    code = _code(graph_module, imports)
    return code.replace("def forward(self, ", f"def {name}(", 1)


def _code(graph_module: GraphModule, imports: dict[str, str]) -> str:
    """The text of ``forward``; what it refers to is added to ``imports``."""
    code = graph_module.graph.python_code("self")
    used = set(re.findall(r"\w+", code.src))  # more is offered than is used
    for name, value in code.globals.items():
        if name in used and name not in _IN_HEADER and name not in imports:
            imports[name] = _import(name, value)
    lines = [line.rstrip() for line in code.src.strip().splitlines()]
    return "\n".join(line for line in lines if line)


def _import(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if value is type(None):
        return f"{name} = type(None)"
    module, inside = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and inside.isidentifier():
        return f"from {module} import {inside} as {name}"
    raise ValueError(f"the graph refers to {name} = {value!r}, which can not be imported")


def _constant(name: str, value: Any) -> str:
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype}).reshape({[*value.shape]})"
    raise ValueError(f"the graph holds {name}, a {type(value).__name__}, which can not be written")

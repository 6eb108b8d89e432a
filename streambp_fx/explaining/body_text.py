"""The ops of loop bodies as lines of text, with the shapes of one chunk.

    v3 = aten.mm(v2, permute(lm_head.weight))  [c, 4096]

``c`` is the chunk's length in tokens. Sizes in arguments, as in ``view(v2, [1, 16384, 4096])``, are
those of the whole: they are rewritten as the body runs, and the shape behind says to what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from ..passes.body import BodyCall, LengthArg, OffsetArg, Ref, Shape, SizeArg
from ..passes.lower import loop_nodes
from ..passes.pipeline import History
from .names import readable_names
from .terms import body_of


def bodies(history: History) -> dict[str, tuple[str, ...]]:
    """The lines of each distinct body, by the name of the first loop that has it.

    Operands have the names that they have in that loop.
    """
    found: dict[str, tuple[str, ...]] = {}
    seen: set[object] = set()
    names = readable_names(history)
    for graph_name in ("forward", "backward"):
        graph_module = history.graphs.get(graph_name)
        for loop in loop_nodes(graph_module) if graph_module is not None else ():
            body = body_of(loop)
            if body.key in seen:
                continue
            seen.add(body.key)
            operands = [
                names[graph_name].of(node) if isinstance(node, Node) else str(node)
                for node in loop.args[2:]
            ]
            found[loop.meta["loop"].name] = tuple(_lines(body.plan.calls, operands))
    return found


def _lines(calls: Sequence[BodyCall], operands: Sequence[str]) -> Iterator[str]:
    for index, call in enumerate(calls):
        args = [_text(arg, operands) for arg in call.args]
        args += [f"{name}={_text(arg, operands)}" for name, arg in call.kwargs.items()]
        shapes = " ".join(_shape(shape) for shape in call.shapes if shape is not None)
        target = str(call.target).removesuffix(".default")
        yield f"v{index} = {target}({', '.join(args)})  {shapes}"


def _text(arg: Any, operands: Sequence[str]) -> str:
    match arg:
        case Ref(kind="call", index=index):
            return f"v{index}"
        case Ref(index=index):
            return operands[index]
        case SizeArg(expr=expr):
            return str(expr)
        case OffsetArg():
            return "start"
        case LengthArg():
            return "c"
        case list() | tuple():
            return f"[{', '.join(_text(item, operands) for item in arg)}]"
        case Mapping():
            return str({key: _text(item, operands) for key, item in arg.items()})
    return str(arg)


def _shape(shape: Shape) -> str:
    dims = [str(dim) for dim in shape.dims]
    if shape.at is not None:
        factors = [str(f) for f in (shape.at.outer, shape.at.inner) if str(f) != "1"]
        dims[shape.at.dim] = "*".join(["c", *factors])
    return f"[{', '.join(dims)}]"

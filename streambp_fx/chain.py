"""Compile the segments of a split graph, each distinct one once, and connect them.

Given:  h1 = submod_1(ids, W0); h2 = submod_2(h1, W1); h3 = submod_3(h2, W2); loss = submod_4(h3, W)
Result: the same calls, of compiled functions: submod_2 and submod_3 are one where their graphs are
        equal but for names, and their inputs but for values

Each compiled function is an autograd node. What connects them at run time is the autograd engine:
gradients of a segment's parameters are accumulated, and hooks called, when its backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from streambp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
    enable_python_dispatcher,
    storage_id,
    to_fake_tensor,
)

from .passes.flow import is_trained
from .passes.history import History
from .passes.rules.sizes import expr_of

Compiled = tuple[Callable[..., Any], History]
CompileSegment = Callable[[GraphModule, Sequence[Any], int], Compiled]
"""``compile_segment(graph_module, example_inputs, number)``: what runs, and what was found."""


@dataclass(frozen=True)
class _Segment:
    """A segment that is not compiled has no gradient; ``unused`` inputs get none."""

    compiled: Compiled | None
    results: Sequence[Any]
    unused: frozenset[int]


class _Called(torch.nn.Module):
    """A module that calls a compiled function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def compile_chain(
    chain: GraphModule, example_inputs: Sequence[Any], compile_segment: CompileSegment
) -> list[History]:
    """Replace the segments of ``chain`` by compiled functions, in place.

    Returns:
        What was found in each segment, in order; equal ones share it.
    """
    given = dict(zip(chain.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    # A program that is traced without data has fakes of its own.
    own = [value.fake_mode for value in example_inputs if isinstance(value, FakeTensor)]
    mode = own[0] if own else detect_fake_mode(list(example_inputs))
    fakes = {node: _fake(value, mode) for node, value in given.items()}
    compiled: dict[Any, _Segment] = {}
    found: list[History] = []
    for node in chain.graph.nodes:  # those that are inserted behind it come too
        if node.op == "call_module":
            module = getattr(chain, str(node.target))
            values = [fakes[one] for one in node.args]
            made = [one.op != "placeholder" for one in node.args]
            key = (_text(module), _kinds(module, values), *made)
            if key not in compiled:
                results = _examples(module, values, mode)
                unused = frozenset(i for i in _without_gradient(values, results) if made[i])
                one = None
                # Positions and the like, which read no weight, are no faster in loops.
                if any(map(is_trained, (*values, *results))):
                    inputs = [given.get(one, fakes[one]) for one in node.args]
                    one = compile_segment(module, _detached(inputs, unused), len(found))
                compiled[key] = _Segment(one, results, unused)
            segment = compiled[key]
            _detach(node, segment.unused)
            # New ones each time: AOTAutograd takes two inputs that are one object for one.
            fakes[node] = [_like(result, mode) for result in segment.results]
            if segment.compiled is not None:
                function, history = segment.compiled
                found.append(history)
                chain.add_submodule(str(node.target), _Called(function))
        elif node.op == "call_function":
            fakes[node] = fakes[node.args[0]][node.args[1]]
            _lay_contiguous(node, fakes, mode)
    chain.recompile()
    return found


def _fake(value: Any, mode: FakeTensorMode | None) -> Any:
    """``value`` without data."""
    if mode is None or not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    return to_fake_tensor(value, mode)


def _examples(
    segment: GraphModule, values: Sequence[Any], mode: FakeTensorMode | None
) -> Sequence[Any]:
    """Examples of what ``segment`` returns; whether they have a gradient is asked of autograd.

    Passes note examples that say nothing of it.
    """
    # The user's hooks, such as checkpointing's, are for what is saved when the step runs.
    no_hooks = saved_tensors_hooks(_itself, _itself)
    # With it, sizes that are symbols in Dynamo's graph remain symbols.
    symbolic = enable_python_dispatcher()
    with mode or nullcontext(), symbolic, no_hooks, torch.enable_grad():
        results: Sequence[Any] = segment(*values)
    return results


def _without_gradient(values: Sequence[Any], results: Sequence[Any]) -> frozenset[int]:
    """The positions of the inputs that no result depends on as far as gradients go."""
    tensors = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
    leaves = {id(one) for one in tensors if one.grad_fn is None}
    stack = [one.grad_fn for one in tensors if one.grad_fn is not None]
    seen = set(stack)
    while stack:
        function: Any = stack.pop()
        leaves.add(id(getattr(function, "variable", None)))
        for before, _ in function.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                stack.append(before)
    return frozenset(
        index
        for index, value in enumerate(values)
        if isinstance(value, Tensor) and value.requires_grad and id(value) not in leaves
    )


def _detached(values: Sequence[Any], unused: frozenset[int]) -> list[Any]:
    return [value.detach() if index in unused else value for index, value in enumerate(values)]


def _detach(call: Node, unused: frozenset[int]) -> None:
    """Hand a segment detached what another one made and it gives no gradient for.

    Autograd would give that one's parameters zeros, where eager gives them nothing.
    """
    for index in unused:
        with call.graph.inserting_before(call):
            detached = call.graph.call_method("detach", (call.args[index],))
        call.update_arg(index, detached)


def _like(value: Any, mode: FakeTensorMode | None) -> Any:
    """An example like ``value`` that shares its memory with nothing, and was made of nothing."""
    if not isinstance(value, Tensor):
        return value
    with mode or nullcontext():
        like = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return like.requires_grad_(value.requires_grad)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _lay_contiguous(result: Node, fakes: dict[Node, Any], mode: FakeTensorMode | None) -> None:
    """Hand ``result`` contiguous to the segments that read it.

    They are compiled for the strides of their examples, and loops lay their results as they like.
    """
    readers = [user for user in result.users if user.op == "call_module"]
    if readers and isinstance(fakes[result], Tensor):
        with result.graph.inserting_after(result):
            laid = result.graph.call_method("contiguous", (result,))
        for reader in readers:
            reader.replace_input_with(result, laid)
        # A leaf of its own, by which to tell whether a gradient comes back to it.
        fakes[laid] = _like(fakes[result].contiguous(), mode)


def _text(graph_module: GraphModule) -> str:
    """The graph without names: equal texts are equal programs."""
    number = {node: index for index, node in enumerate(graph_module.graph.nodes)}

    def named(argument: Any) -> Any:
        return map_arg(argument, lambda node: _Numbered(number[node]))

    lines = []
    for node in graph_module.graph.nodes:
        target = ""
        if node.op == "get_attr":
            held = getattr(graph_module, str(node.target))
            target = _text(held) if isinstance(held, GraphModule) else str(id(held))
        elif node.op not in ("placeholder", "output"):
            target = f"{node.target!r} {id(node.target) if callable(node.target) else ''}"
        lines.append(f"{node.op} {target} {named(node.args)!r} {named(node.kwargs)!r}")
    return "\n".join(lines)


class _Numbered(str):
    """How a node is written in a graph's text."""

    def __new__(cls, number: int) -> _Numbered:
        return super().__new__(cls, f"%{number}")

    def __repr__(self) -> str:
        return str(self)


def _kinds(segment: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """All that a compiled graph may rely on of its inputs but their elements."""
    placeholders = segment.graph.find_nodes(op="placeholder")
    memory: dict[int, int] = {}
    kinds: list[Any] = []
    for node, value in zip(placeholders, inputs, strict=True):
        if not isinstance(value, Tensor):
            kinds.append(str(expr_of(value)) if isinstance(value, torch.SymInt) else repr(value))
            continue
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        kinds.append(
            (
                type(value),
                isinstance(value, torch.nn.Parameter),
                node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"),
                value.ndim,
                tuple(str(expr_of(size)) for size in sizes),
                value.dtype,
                value.device,
                value.requires_grad,
                memory.setdefault(storage_id(value), len(memory)),
            )
        )
    return tuple(kinds)

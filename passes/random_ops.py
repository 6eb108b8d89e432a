"""Make random numbers a function of a seed and a position, so that chunks can draw them again.

Given the joint graph of dropout::

    rand = aten.rand([B, T, d])
    kept = gt(rand, 0.1)
    ...                                   # forward and backward use `kept`

Result::

    seed = aten.randint.low(0, 2**62, [], dtype=int64)      # among the first nodes
    rand = streambp.uniform(seed, [B, T, d], [0, 0, 0], float32)
    kept = gt(rand, 0.1)
    ...

A chunk of the sequence then draws its part by an offset, in forward and again in backward, and the
numbers do not depend on how the sequence is chunked. They differ from those that the unrewritten
program draws; ``torch.manual_seed`` makes them reproducible as it does there.

The seeds are the only draws that remain. They must not be repeated: they belong to the forward
glue and are saved for backward. A 0-d int64 ``randint`` that is in the graph already (a seed of
attention dropout) is one of them and stays.

Ops whose numbers are not a pointwise function of uniform ones (``multinomial``, ``randperm``,
``poisson``) stay and are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from streambp_fx._torch import OpOverload, detect_fake_mode
from streambp_fx.ops.philox import uniform

from .rules.sizes import product, same_size
from .rules.spec import Size

aten = torch.ops.aten
prims = torch.ops.prims

SEED_LIMIT = 2**62

_COMPARISONS = frozenset(
    {
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.le.Scalar,
        aten.le.Tensor,
    }
)


def is_seed(node: Node) -> bool:
    """Whether a node draws a seed: the one kind of random node that the pass leaves."""
    value = node.meta.get("val")
    return (
        node.target is aten.randint.low
        and isinstance(value, Tensor)
        and value.ndim == 0
        and value.dtype is torch.int64
    )


def replay_random_ops(gm: GraphModule) -> list[tuple[Node, str]]:
    """Replace the random ops of an aten graph (fake values in ``meta["val"]``), in place.

    Returns:
        The random nodes that stay, each with the reason: barriers for streaming.
    """
    seeds = _Seeds(gm.graph)
    left: list[tuple[Node, str]] = []
    for node in list(gm.graph.nodes):
        if not _draws(node) or is_seed(node):
            continue
        replacement = _REPLACEMENTS.get(node.target)
        if replacement is None:
            left.append((node, "the op is no pointwise function of uniform numbers"))
            continue
        obstacle = _obstacle(node)
        if obstacle is not None:
            left.append((node, f"the op {obstacle}"))
            continue
        with gm.graph.inserting_before(node):
            replacement(_Draw(node, seeds))
    gm.graph.lint()
    gm.recompile()
    return left


def _draws(node: Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    # Attention and dropout carry the tag, and draw nothing without dropout.
    named = _named_arguments(node)
    return named.get("dropout_p") != 0.0 and named.get("train") is not False


def _named_arguments(node: Node) -> dict[str, Any]:
    """A node's arguments by name, with the op's defaults."""
    target = cast("OpOverload", node.target)
    named = {
        argument.name: node.args[index] if index < len(node.args) else argument.default_value
        for index, argument in enumerate(target._schema.arguments)
    }
    return {**named, **node.kwargs}


def _obstacle(node: Node) -> str | None:
    """Why a node with a replacement can not be replaced."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, tuple | list) else value
    named = _named_arguments(node)
    if named.get("generator") is not None:
        return "uses a generator of its own"
    if value.is_complex():
        return "makes complex ones"
    if not _is_contiguous(value):
        return "makes a permuted tensor of them"
    if "high" in named:
        low, high = named.get("low", 0), named["high"]
        if not isinstance(low, int) or not isinstance(high, int) or high - low > 2**53:
            return "has a range that is not a number or is above 2**53"
    return None


def _is_contiguous(value: Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor for every value of the symbols."""
    expected: Size = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected = product((expected, size))
    return True


class _Seeds:
    """Draws seeds as the first nodes of a graph, in the order they are asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # Nodes that come after the inputs; an input stays where it is, so it marks the place.
        placeholders = list(graph.find_nodes(op="placeholder"))
        self._last: Node | None = placeholders[-1] if placeholders else None

    def draw(self, like: Tensor, fake_mode: AbstractContextManager[Any]) -> Node:
        """A new seed, on the device of ``like``."""
        at = self._graph.inserting_after(self._last) if self._last else nullcontext()
        if self._last is None:
            at = self._graph.inserting_before(next(iter(self._graph.nodes)))
        kwargs: dict[str, Any] = {"dtype": torch.int64, "device": like.device, "pin_memory": False}
        with at:
            seed: Node = self._graph.call_function(aten.randint.low, (0, SEED_LIMIT, []), kwargs)
        with fake_mode:
            seed.meta["val"] = aten.randint.low(0, SEED_LIMIT, [], **kwargs)
        self._last = seed
        return seed


class _Draw:
    """One random node that is being replaced, with what its replacement is written with."""

    def __init__(self, node: Node, seeds: _Seeds) -> None:
        self.node = node
        self.named: dict[str, Any] = _named_arguments(node)
        value = node.meta["val"]
        self.value: Tensor = value[0] if isinstance(value, tuple | list) else value
        self.dtype = self.value.dtype
        # Narrow dtypes are computed in float32 and rounded once, as the kernels do.
        self.wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        self._seeds = seeds
        self._fake_mode = detect_fake_mode([self.value]) or nullcontext()
        self._size: list[int | Node] | None = None

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call with its fake value."""
        result: Node = self.node.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda node: node.meta["val"])
        with self._fake_mode:
            result.meta["val"] = target(*fake_args, **fake_kwargs)
        if "stack_trace" in self.node.meta:
            result.meta["stack_trace"] = self.node.meta["stack_trace"]
        return result

    def uniform(self, dtype: torch.dtype) -> Node:
        """Fresh uniform numbers of the node's shape."""
        seed = self._seeds.draw(self.value, self._fake_mode)
        size = self._sizes()
        return self.emit(uniform, seed, size, [0] * len(size), dtype)

    def normal(self) -> Node:
        """Fresh standard normal numbers of the node's shape in ``wide`` (Box and Muller)."""
        radius = self.emit(aten.neg.default, self.uniform(self.wide))
        radius = self.emit(aten.log1p.default, radius)
        radius = self.emit(aten.sqrt.default, self.emit(aten.mul.Tensor, radius, -2.0))
        angle = self.emit(aten.mul.Tensor, self.uniform(self.wide), 2.0 * math.pi)
        return self.emit(aten.mul.Tensor, radius, self.emit(aten.cos.default, angle))

    def cast(self, node: Node) -> Node:
        """``node`` in the dtype of the node that is replaced."""
        if node.meta["val"].dtype is self.dtype:
            return node
        return self.emit(prims.convert_element_type.default, node, self.dtype)

    def finish(self, *results: Node) -> None:
        """Put ``results`` in place of the node's outputs."""
        if isinstance(self.node.meta["val"], tuple | list):
            for user in list(self.node.users):
                user.replace_all_uses_with(results[cast("int", user.args[1])])
                user.graph.erase_node(user)
        else:
            self.node.replace_all_uses_with(results[0])
        inputs = self.node.all_input_nodes
        self.node.graph.erase_node(self.node)
        for given in inputs:
            # Random ops that fill a tensor are given an empty one.
            if given.target is aten.empty.memory_format and not given.users:
                given.graph.erase_node(given)

    def _sizes(self) -> list[int | Node]:
        """The node's shape as arguments of a call."""
        if self._size is None:
            literal = self.named.get("size", self.named.get("shape"))
            filled: Any = self.named.get("self", self.named.get("input"))
            if literal is None and filled.target is aten.empty.memory_format:
                literal = filled.args[0]
            if literal is None:
                literal = [
                    size if isinstance(size, int) else self.emit(aten.sym_size.int, filled, dim)
                    for dim, size in enumerate(self.value.shape)
                ]
            self._size = list(literal)
        return self._size


def _rand(draw: _Draw) -> None:
    # With the 8 digits of bfloat16, dropout's `rand > 0.1` drops 10.2 %: where the numbers are
    # only compared, they keep the digits of float32.
    compared = all(user.target in _COMPARISONS for user in draw.node.users)
    draw.finish(draw.uniform(draw.wide if compared else draw.dtype))


def _uniform(draw: _Draw) -> None:
    low, high = draw.named["from"], draw.named["to"]
    scaled = draw.emit(aten.mul.Tensor, draw.uniform(draw.wide), high - low)
    draw.finish(draw.cast(draw.emit(aten.add.Tensor, scaled, low)))


def _normal(draw: _Draw) -> None:
    scaled = draw.normal()
    if "std" in draw.named:
        scaled = draw.emit(aten.mul.Tensor, scaled, draw.named["std"])
        scaled = draw.emit(aten.add.Tensor, scaled, draw.named["mean"])
    draw.finish(draw.cast(scaled))


def _exponential(draw: _Draw) -> None:
    negated = draw.emit(aten.neg.default, draw.uniform(draw.wide))
    log = draw.emit(aten.log1p.default, negated)
    draw.finish(draw.cast(draw.emit(aten.mul.Tensor, log, -1.0 / draw.named["lambd"])))


def _bernoulli(draw: _Draw) -> None:
    probability = draw.named.get("p", draw.named["self"])
    compare = aten.lt.Tensor if isinstance(probability, Node) else aten.lt.Scalar
    draw.finish(draw.cast(draw.emit(compare, draw.uniform(draw.wide), probability)))


def _native_dropout(draw: _Draw) -> None:
    rate = draw.named["p"]
    kept = draw.emit(aten.ge.Scalar, draw.uniform(draw.wide), rate)
    masked = draw.emit(aten.mul.Tensor, draw.named["input"], kept)
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    draw.finish(draw.emit(aten.mul.Tensor, masked, scale), kept)


def _randint(draw: _Draw) -> None:
    low, high = draw.named.get("low", 0), draw.named["high"]
    # 53 digits: in float32 a range above 2**24 would have holes.
    scaled = draw.emit(aten.mul.Tensor, draw.uniform(torch.float64), float(high - low))
    whole = draw.emit(prims.convert_element_type.default, scaled, torch.int64)
    draw.finish(draw.cast(draw.emit(aten.add.Tensor, whole, low)))


_REPLACEMENTS: dict[Any, Callable[[_Draw], None]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand,
    aten.uniform.default: _uniform,
    aten.randn.default: _normal,
    aten.randn_like.default: _normal,
    aten.normal_functional.default: _normal,
    prims.normal.default: _normal,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.native_dropout.default: _native_dropout,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randint_like.default: _randint,
    aten.randint_like.low_dtype: _randint,
}

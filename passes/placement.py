"""Where the streamed axis sits in a tensor, and sizes that may be symbolic.

Glossary
--------
streamed axis
    The sequence axis, of length ``T`` (tokens).
extent
    ``Extent(lo, hi)``: the value covers positions ``[lo, T - hi)`` of the streamed axis, as
    ``logits[:, :-1]`` covers ``Extent(0, 1)``.
position
    ``Streamed(dim, outer, inner, extent)``: tensor dim ``dim`` is ``outer x length x inner``
    (outermost first) and the factor ``length`` is the streamed axis. ``[B, T, d]`` viewed as
    ``[B*T, d]`` is ``Streamed(0, outer=B, inner=1)``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from .rules.sizes import expr_of, product, same_size
from .rules.spec import Dims, Letter, Size, Spec


def hint_of(size: Size) -> int:
    """The value of a size in the traced example; for cost decisions alone, adds no guard."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return int(hint) if hint is not None else 8192
    return int(size)


def outermost_first(tensor: torch.Tensor) -> list[int]:
    """The dims by falling stride; compares hints alone."""
    strides = [hint_of(stride) for stride in tensor.stride()]
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


@dataclass(frozen=True)
class Extent:
    """Positions ``[lo, T - hi)`` of the streamed axis."""

    lo: int = 0
    hi: int = 0

    def length(self, total: Size) -> Size:
        """How many of ``total`` positions the extent covers."""
        return total - self.lo - self.hi


FULL = Extent()


@dataclass(frozen=True)
class Streamed:
    """The tensor is the concatenation of its chunks along (a factor of) ``dim``."""

    dim: int
    outer: Size = 1
    inner: Size = 1
    extent: Extent = FULL

    def key(self) -> tuple[Any, ...]:
        """Hashable identity; two symbolic sizes are equal if their expressions are."""
        return (self.dim, expr_of(self.outer), expr_of(self.inner), self.extent)

    def matches(self, other: Streamed) -> bool:
        """Whether both say the same."""
        return self.key() == other.key()


def locate(spec: Spec, dims: Dims, at: Streamed, length: Size) -> tuple[Spec, Letter] | None:
    """The letter of ``dims`` that is the streamed axis at position ``at``, if there is one.

    The axis may be a factor of a letter, as ``T`` is of the rows of ``mm`` on ``[B*T, d]``. Then
    the letter is split in the returned spec: what holds for it holds for each of its factors.
    """
    if at.dim >= len(dims):
        return None
    outer: Size = 1
    for index, letter in enumerate(dims[at.dim]):
        size = spec.sizes[letter]
        if same_size(outer, at.outer) and same_size(size, length):
            return spec, letter
        first, last = index == 0, index == len(dims[at.dim]) - 1
        before = at.outer if first else (1 if same_size(outer, at.outer) else None)
        after = at.inner if last else 1
        if before is not None and same_size(size, product((before, length, after))):
            if spec.positional and not same_size(before, 1):
                return None
            return _split_letter(spec, letter, before, length, after)
        outer = product((outer, size))
    return None


def _split_letter(
    spec: Spec, letter: Letter, before: Size, length: Size, after: Size
) -> tuple[Spec, Letter]:
    """``letter`` replaced by three factors, the middle one returned."""
    names = (f"{letter}.outer", f"{letter}.axis", f"{letter}.inner")

    def split(dims: Dims | None) -> Dims | None:
        if dims is None:
            return None
        return tuple(
            tuple(part for name in one for part in (names if name == letter else (name,)))
            for one in dims
        )

    def spread(letters: frozenset[Letter]) -> frozenset[Letter]:
        return letters | set(names) if letter in letters else letters

    changed = replace(
        spec,
        inputs=tuple(split(dims) or () for dims in spec.inputs),
        outputs=tuple(split(dims) for dims in spec.outputs),
        sizes={**spec.sizes, **dict(zip(names, (before, length, after), strict=True))},
        whole=spread(spec.whole),
        sums=spread(spec.sums),
    )
    return changed, names[1]


def position_of(spec: Spec, dims: Dims, letter: Letter, extent: Extent) -> Streamed | None:
    """Where ``letter`` sits in ``dims``."""
    for dim, letters in enumerate(dims):
        if letter in letters:
            index = letters.index(letter)
            outer = product(spec.sizes[name] for name in letters[:index])
            inner = product(spec.sizes[name] for name in letters[index + 1 :])
            return Streamed(dim, outer, inner, extent)
    return None


def value_of(node: Node) -> Any:
    """The fake value of a node."""
    return node.meta.get("val")


def is_ids(node: Node, length: Size) -> bool:
    """Whether a value that no input labels may be the tokens, ``cat([prompt, completion], 1)``."""
    value = value_of(node)
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 2
        and not value.is_floating_point()
        and same_size(value.shape[1], length)
        and not same_size(value.shape[0], length)
    )


def tensor_inputs(node: Node) -> list[Node]:
    """The tensor-valued argument nodes in flattened order, once for each appearance."""
    found: list[Node] = []

    def visit(arg: Any) -> Any:
        if isinstance(arg, Node) and isinstance(value_of(arg), torch.Tensor):
            found.append(arg)
        return arg

    torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), visit)
    return found


def source_of(node: Node) -> str:
    """The user's source line a node comes from, for reports."""
    return last_line(node.meta.get("stack_trace"))


def last_line(stack_trace: str | None) -> str:
    """The innermost frame of a stack trace, and its code."""
    trace = stack_trace or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("File "):
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{lines[index]}: {code}" if code else lines[index]
    return "source line unknown"

"""What is proven of an attention mask: causal, windowed, absent.

Glossary
--------
allowed
    A boolean mask's element is True, or an additive mask's is not a fill.
fill
    An additive mask's ``-inf``, or a finite number that no score outweighs (`finite_fill`).
q, k
    The coordinates of the mask's last two dims, query and key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from .mask_algebra import (
    FALSE,
    TRUE,
    Atom,
    Formula,
    Linear,
    at_least_zero,
    conditions,
    conjunction,
    disjunction,
    implies,
    unsatisfiable,
)
from .mask_handlers import Index
from .mask_interpreter import Interpreter
from .mask_runs import consequences
from .mask_values import Real, Value, constant_value, data_names


def finite_fill(dtype: torch.dtype) -> float:
    """The largest number that counts as a fill among scores of ``dtype``.

    Softmax makes exactly 0 of a key at the lowest number of a dtype, unless scores are so far
    apart that the dtype hardly holds their difference. Any higher number is one that scores may
    reach: ``-1e9`` hides nothing where scores are of that size. float16 has no number that is low
    enough. What is lowest in bfloat16 is so in float32, where such masks are converted to it.
    """
    if dtype == torch.float16:
        return -math.inf
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.bfloat16).min


@dataclass(frozen=True)
class MaskFacts:
    """What is proven of a mask; a False is "not proven", never "disproven".

    implies_causal
        Every allowed key has ``k <= q``.
    exactly_causal
        The mask does what ``causal=True`` does without a mask: a key is allowed, with 0 added,
        if and only if ``k <= q``.
    within_causal
        Every key with ``k <= q`` is allowed, with 0 added: the mask adds nothing to
        ``causal=True``.
    always_allowed
        The mask does nothing.
    window
        Every allowed key has ``k > q - window``; the smallest such number that was found.
    exactly_window_causal
        A key is allowed, with 0 added, if and only if ``q - window < k <= q``.
    rows_allow_self
        The key ``k = q`` is allowed, with 0 added, in every row.
    finite_fill
        Some keys are excluded by a finite fill. A row in which nothing but fills is found attends
        to all of them, so the facts above are then claimed only where `rows_allow_self`. (An
        element of unknown value counts as allowed, not as a fill.)
    assumes_finite
        Nodes whose elements were taken not to be +inf or NaN.
    reason
        What keeps the mask from being `exactly_causal`, for reports; empty where nothing does.
    """

    implies_causal: bool = False
    exactly_causal: bool = False
    within_causal: bool = False
    always_allowed: bool = False
    window: int | None = None
    exactly_window_causal: bool = False
    rows_allow_self: bool = False
    finite_fill: bool = False
    assumes_finite: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True)
class _Element:
    """The three things one element of a mask can be, as conditions on its coordinates.

    ``allowed`` holds at least wherever the element may be no fill, ``plain`` at most where it is
    allowed with 0 added, ``finite`` at least where it is a finite fill.
    """

    allowed: Formula
    plain: Formula
    finite: Formula
    assumes_finite: frozenset[str] = frozenset()


def prove_mask(
    node: Node, interpreter: Interpreter | None = None, scores: torch.dtype | None = None
) -> MaskFacts:
    """The facts of the mask that ``node`` computes, ``[..., L, S]`` or broadcastable to it.

    Args:
        node: a boolean (True: may attend) or additive floating-point mask.
        interpreter: of the node's graph, to share what was computed for other masks.
        scores: the dtype of what an additive mask is added to, if it is not the mask's.

    Adds no guards: sizes are compared as expressions.
    """
    interpreter = interpreter or Interpreter(node.graph)
    dtype = node.meta["val"].dtype
    if interpreter.obstacle is not None:
        return MaskFacts(reason=f"{interpreter.obstacle.name} writes to a tensor in place")
    if not (dtype == torch.bool or dtype.is_floating_point):
        return MaskFacts(reason=f"a mask of {dtype} is neither boolean nor additive")
    fill = finite_fill(torch.promote_types(dtype, scores or dtype))
    sizes = interpreter.sizes(node)
    row, column = _rows(sizes), _columns(sizes)
    value = interpreter.value(node, _index(sizes, row, column))
    element = _with_consequences(_classified(value, fill), interpreter)
    own = _columns(sizes) if _has(sizes, 1) else _rows(sizes)
    is_square = not (_has(sizes, 1) and _has(sizes, 2)) or sizes[-1] == sizes[-2]
    diagonal = _classified(interpreter.value(node, _index(sizes, own, own)), fill)
    facts = _facts(element, diagonal, row, column, is_square)
    if facts.exactly_causal or facts.always_allowed:
        return facts
    return replace(facts, reason=_reason(node, element, facts))


def _facts(
    element: _Element, diagonal: _Element, row: Linear, column: Linear, is_square: bool
) -> MaskFacts:
    past, future = at_least_zero(row - column), at_least_zero(column - row - 1)
    rows_allow_self = is_square and implies(TRUE, diagonal.plain)
    finite_fill = not unsatisfiable(element.finite)
    claims = rows_allow_self or not finite_fill
    implies_causal = claims and unsatisfiable(element.allowed, future)
    within_causal = implies(past, element.plain)
    window = _smallest_window(element, row, column) if claims else None
    exactly_window = False
    if window is not None and implies_causal:
        exactly_window = implies(
            conjunction([past, at_least_zero(column - row + window - 1)]), element.plain
        )
    return MaskFacts(
        implies_causal=implies_causal,
        exactly_causal=implies_causal and within_causal,
        within_causal=within_causal,
        always_allowed=implies(TRUE, element.plain),
        window=window,
        exactly_window_causal=exactly_window,
        rows_allow_self=rows_allow_self,
        finite_fill=finite_fill,
        assumes_finite=element.assumes_finite | diagonal.assumes_finite,
    )


def _has(sizes: tuple[Linear, ...], from_end: int) -> bool:
    """Whether the mask has that dim, rather than being broadcast along it."""
    return len(sizes) >= from_end and not sizes[-from_end].is_value(1)


def _rows(sizes: tuple[Linear, ...]) -> Linear:
    return _coordinate("q", sizes[-2] if _has(sizes, 2) else None)


def _columns(sizes: tuple[Linear, ...]) -> Linear:
    return _coordinate("k", sizes[-1] if _has(sizes, 1) else None)


def _coordinate(name: str, size: Linear | None) -> Linear:
    high = None if size is None else size - 1
    return Linear.of(Atom(("coordinate", name, size), low=0, high=high))


def _index(sizes: tuple[Linear, ...], row: Linear, column: Linear) -> Index:
    leading = [_coordinate(f"dim {dim}", size) for dim, size in enumerate(sizes[:-2])]
    return (*leading, row, column)[-len(sizes) :] if sizes else ()


def _classified(value: Value, fill: float) -> _Element:
    if not isinstance(value, tuple):
        return _Element(allowed=value, plain=value, finite=FALSE)
    allowed, plain, finite = [], [], []
    assumes: frozenset[str] = frozenset()
    for guard, number in value:
        constant = constant_value(number)
        if isinstance(number, Real):
            assumes |= number.assuming
        if constant == 0:
            plain.append(guard)
        if constant is None or not constant <= fill:
            allowed.append(guard)
        elif constant > float("-inf"):
            finite.append(guard)
    return _Element(disjunction(allowed), disjunction(plain), disjunction(finite), assumes)


def _with_consequences(element: _Element, interpreter: Interpreter) -> _Element:
    """The element, its ``allowed`` made stricter by what is known of running sums."""
    known = consequences(element.allowed, interpreter)
    return replace(element, allowed=conjunction([element.allowed, *known]))


def _smallest_window(element: _Element, row: Linear, column: Linear) -> int | None:
    for width in sorted(set(_window_candidates(element.allowed, row, column))):
        outside = at_least_zero(row - column - width)
        if unsatisfiable(element.allowed, outside):
            return width
    return None


def _window_candidates(allowed: Formula, row: Linear, column: Linear) -> Iterator[int]:
    """Widths that the conditions speak of: ``k - q + width - 1 >= 0``, or blocks of a width."""
    for expression in conditions(allowed):
        difference = expression - (column - row)
        if difference.is_constant and difference.const >= 0:
            yield difference.const + 1
        for atom in expression.terms:
            if atom.quotient is not None:
                yield atom.quotient[1]


def _reason(node: Node, element: _Element, facts: MaskFacts) -> str:
    data = sorted(set(_data(conditions(element.allowed))))
    origin = f" (the elements of {', '.join(data[:4])} are data)" if data else ""
    if facts.finite_fill and not facts.rows_allow_self:
        return (
            f"{node.name} fills with a finite number, and not every row is known to allow a key; "
            f"a row without one attends to all keys{origin}"
        )
    if not facts.implies_causal:
        return f"{node.name} is not known to exclude the keys after each query{origin}"
    return f"{node.name} excludes more than the keys after each query, or adds to scores{origin}"


def _data(expressions: Iterable[Linear]) -> Iterator[str]:
    for expression in expressions:
        yield from data_names(expression)


def constant_facts(mask: torch.Tensor, rows: int = 256) -> MaskFacts:
    """The facts of a mask whose values are known, such as a buffer, by looking at them.

    Args:
        mask: boolean or additive, ``[..., L, S]``, not a fake tensor.
        rows: how many rows are looked at together; the temporaries are that many rows large.

    Raises:
        ValueError: the mask has fewer than two dims, or is neither boolean nor floating-point.
    """
    if mask.dim() < 2 or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise ValueError(
            f"a mask is a boolean or floating-point tensor of at least two dims, got {mask.dtype} "
            f"of shape {tuple(mask.shape)}"
        )
    length, keys = mask.shape[-2:]
    columns = torch.arange(keys, device=mask.device)
    future_free, past_plain, all_plain, self_plain, finite = True, True, True, length == keys, False
    farthest, nearest_missing = -1, keys
    for start in range(0, length, rows):
        block = mask[..., start : start + rows, :].detach()
        ahead = columns - torch.arange(start, start + block.shape[-2], device=mask.device)[:, None]
        if mask.dtype == torch.bool:
            allowed = plain = block
        else:
            allowed, plain = ~(block <= finite_fill(mask.dtype)), block == 0
            finite |= bool((~allowed & block.isfinite()).any())
        future_free &= not bool((allowed & (ahead > 0)).any())
        past_plain &= bool((plain | (ahead > 0)).all())
        all_plain &= bool(plain.all())
        self_plain &= bool((plain | (ahead != 0)).all())
        behind = torch.where(allowed, -ahead, -1)
        farthest = max(farthest, int(behind.max()) if behind.numel() else -1)
        missing = torch.where(~plain & (ahead <= 0), -ahead, keys)
        nearest_missing = min(nearest_missing, int(missing.min()) if missing.numel() else keys)
    claims = self_plain or not finite
    implies_causal = claims and future_free
    window = max(farthest, 0) + 1 if claims and farthest + 1 < keys else None
    exactly_window = implies_causal and window is not None and nearest_missing >= window
    facts = MaskFacts(
        implies_causal=implies_causal,
        exactly_causal=implies_causal and past_plain,
        within_causal=past_plain,
        always_allowed=all_plain,
        window=window,
        exactly_window_causal=exactly_window,
        rows_allow_self=self_plain,
        finite_fill=finite,
    )
    if facts.exactly_causal or facts.always_allowed:
        return facts
    return replace(facts, reason="the mask's values are not those of a causal mask")

"""Products of tokens with tokens, whose result runs over the sequence along two of its dims.

Given:  ``scores = bmm(q, k_t)``, of ``q [b, T, d]`` and ``k_t [b, d, T]``, both streamed
Result: the rows of ``scores [b, T, T]`` are streamed; a chunk of rows takes a chunk of q and the
        whole of ``k_t``, which is made by a loop before. The columns are noted, so that

            weights @ v             takes the whole of v along them, and
            scores_grad.mT @ q      is a sum over rows that the next loop reads by chunk of columns

Which dim is the rows is only a matter of cost: the one that no later op mixes (a softmax is over
the columns), or that of a value which the result meets and whose rows are streamed already. Where
neither tells, a gradient's rows are those of the gradient that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Protocol

import torch
from torch.fx import Node

from .placement import Extent, Streamed, locate, position_of, tensor_inputs, value_of
from .rules import call_of, rule_for
from .rules.sizes import same_size
from .rules.spec import Dims, Letter, Size, Spec

MADE = (torch.Tensor, tuple, list)
"""What the value of a call is that makes tensors: one, or several."""


class Placed(Protocol):
    """What is asked of the analysis so far."""

    length: Size
    columns: dict[Node, Streamed]
    dependent: Set[Node]

    def position(self, node: Node) -> Streamed | None:
        """The position of the streamed axis."""

    def in_loop(self, node: Node) -> bool:
        """Whether the node is computed inside a loop."""


def row_letter(
    placed: Placed,
    node: Node,
    spec: Spec,
    sources: Sequence[Node],
    carried: Mapping[int, Letter],
    extent: Extent,
) -> Letter | None:
    """Which of the two letters that the inputs of ``node`` are streamed along the loop runs over.

    ``carried`` has the letter of each streamed input, all of them of ``extent``. ``None`` where a
    chunk of either letter needs the whole of a product of tokens with tokens.
    """
    letters = list(dict.fromkeys(carried.values()))
    products = {
        letter
        for index, letter in carried.items()
        if sources[index] in placed.columns or _runs_over(spec.inputs[index], letters)
    }
    if len(products) > 1:
        return None
    gradients = [carried[index] for index in carried if sources[index] in placed.dependent]
    letters = list(dict.fromkeys([*gradients, *letters]))
    (row,) = products or {_row_by_use(placed, node, spec, letters, extent) or letters[0]}
    return None if row in spec.whole else row


def added_row(
    placed: Placed, node: Node, spec: Spec, column: Letter, extent: Extent
) -> Letter | None:
    """The letter that an expansion along the sequence adds, if the loop runs over that one.

    ``keys[:, None, :].expand(B, T, T)`` is streamed along the keys, unless what it meets tells that
    these are the columns.
    """
    length = extent.length(placed.length)
    taken = {letter for dims in spec.inputs for one in dims for letter in one}
    for dims in spec.outputs[0] or ():
        for letter in dims:
            if letter not in taken and same_size(spec.sizes[letter], length):
                row = _row_by_use(placed, node, spec, [column, letter], extent)
                return letter if row == letter else None
    return None


def column_of(
    placed: Placed,
    spec: Spec,
    sources: Sequence[Node],
    carried: Mapping[int, Letter],
    row: Letter,
    extent: Extent,
) -> Streamed | None:
    """Where the first output runs over the sequence a second time, beside ``row``."""
    dims = spec.outputs[0]
    for index, source in enumerate(sources):
        at = placed.columns.get(source)
        letter = carried.get(index)
        if at is not None:
            found = _find(placed, spec, index, at)
            if found is None:
                continue
            spec, letter = found
            dims = spec.outputs[0]
        if dims is not None and letter is not None and letter != row:
            place = position_of(spec, dims, letter, extent)
            if place is not None:
                return place
    return None


def _row_by_use(
    placed: Placed, node: Node, spec: Spec, letters: list[Letter], extent: Extent
) -> Letter | None:
    """The row letter of a product of two values that are no such products themselves.

    ``None`` if its uses do not tell.
    """
    dims = spec.outputs[0] or ()
    places = {letter: position_of(spec, dims, letter, extent) for letter in letters}
    carrying: dict[Node, dict[Letter, Streamed]] = {
        node: {letter: at for letter, at in places.items() if at is not None}
    }
    for user in _after(node):
        if not any(source in carrying for source in user.all_input_nodes):
            continue
        rule = rule_for(user.target)
        found = rule(call_of(user)) if rule is not None else None
        if found is None:
            continue
        there, streamed, found = _letters_at(placed, found, tensor_inputs(user), carrying)
        for letter, name in there.items():
            if name in streamed:
                return letter
        # A sum over the keys tells what the rows are; the gradients of both are such sums.
        against = found.whole if node in placed.dependent else found.whole | found.sums
        mixed = [letter for letter in there if there[letter] in against]
        kept = [letter for letter in letters if letter not in mixed]
        if mixed and kept:
            return kept[0]
        outcome = {
            letter: position_of(found, found.outputs[0] or (), name, extent)
            for letter, name in there.items()
        }
        carrying[user] = {letter: at for letter, at in outcome.items() if at is not None}
    return None


def _letters_at(
    placed: Placed,
    spec: Spec,
    sources: Sequence[Node],
    carrying: Mapping[Node, Mapping[Letter, Streamed]],
) -> tuple[dict[Letter, Letter], set[Letter], Spec]:
    """Where a call meets the letters of ``carrying``, and rows that are streamed already."""
    there: dict[Letter, Letter] = {}
    streamed: set[Letter] = set()
    for index, source in enumerate(sources):
        for letter, place in carrying.get(source, {}).items():
            found = _find(placed, spec, index, place)
            if found is not None:
                spec, there[letter] = found
    for index, source in enumerate(sources):
        at = placed.position(source) if placed.in_loop(source) else None
        found = None if at is None else _find(placed, spec, index, at)
        if found is not None:
            spec, name = found
            if source in placed.columns or _runs_over(spec.inputs[index], there.values()):
                streamed.add(name)
    return there, streamed, spec


def _find(placed: Placed, spec: Spec, index: int, at: Streamed) -> tuple[Spec, Letter] | None:
    """The letter that is the sequence at position ``at`` of an input."""
    return locate(spec, spec.inputs[index], at, at.extent.length(placed.length))


def _runs_over(dims: Dims, letters: Iterable[Letter]) -> bool:
    """Whether a tensor has both of ``letters``: it is as large as a product of tokens with tokens,
    though it may be none that is known (the expanded gradient of a sum, a slice)."""
    both = {*letters}
    return len(both) == 2 and both <= {letter for one in dims for letter in one}


def _after(node: Node) -> Iterator[Node]:
    """The calls after ``node`` that make tensors, in graph order."""
    current = node.next
    while current.op != "output":
        if current.op == "call_function" and isinstance(value_of(current), MADE):
            yield current
        current = current.next

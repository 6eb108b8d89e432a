"""Replace attention masks that are proven causal by ``causal=True``.

Given   ``mask = le(unsqueeze(iota(T), 0), unsqueeze(iota(T), 1))``
        ``attention(q, k, v, mask, seed, False, scale, dropout_p)``
Result  ``attention(q, k, v, None, seed, True, scale, dropout_p)``, and no ``mask``

A mask that excludes more than the keys after each query (padding, documents, a window) stays as
the bias beside ``causal=True``, to be evaluated for a chunk of rows at a time. The backward's
operands change like the forward's. A mask of which nothing is proven stays as it is, and the
report says what kept it.

Out of scope: masks whose values are data (see `mask_facts.constant_facts`), and making the window
or the documents an argument of the op.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from streambp_fx._torch import statically_known_true

from .axes import attention_arguments
from .mask_facts import MaskFacts, prove_mask
from .mask_handlers import op_of
from .mask_interpreter import Interpreter
from .placement import source_of

Change = Literal["removed", "replaced by causal", "causal added", "kept"]


@dataclass(frozen=True)
class MaskReport:
    """What became of one attention call's mask.

    ``source`` is the user's line that made the mask.
    """

    attention: str
    mask: str
    change: Change
    facts: MaskFacts
    source: str

    def __str__(self) -> str:
        text = f"{self.attention}: mask {self.mask} {self.change}"
        if self.change in ("kept", "causal added"):
            text += f": {self.facts.reason}"
        return f"{text} ({self.source})"


def simplify_causal_masks(gm: GraphModule) -> list[MaskReport]:
    """Simplify the mask of every ``streambp::attention`` and its backward in ``gm``, in place.

    Returns one report for each call that had a mask, in the graph's order.

    1. Prove each distinct mask once.
    2. Decide, for each call, the new ``bias`` and ``causal``.
    3. Erase masks without users, and what only they used.
    """
    interpreter = Interpreter(gm.graph)
    facts: dict[tuple[Node, torch.dtype], MaskFacts] = {}
    reports = []
    for call in list(gm.graph.nodes):
        positions = _operand_positions(call)
        if positions is None:
            continue
        arguments: dict[str, Any] = attention_arguments(call)
        mask = arguments["bias"]
        if not isinstance(mask, Node):
            continue
        key = (mask, arguments["query"].meta["val"].dtype)
        if key not in facts:
            facts[key] = prove_mask(mask, interpreter, key[1])
        change = _decide(facts[key], arguments["causal"], _is_square(arguments))
        _apply(call, change, positions)
        reports.append(MaskReport(call.name, mask.name, change, facts[key], source_of(mask)))
    _erase_unused(mask for mask, _ in facts)
    gm.recompile()
    return reports


def _decide(facts: MaskFacts, causal: bool, is_square: bool) -> Change:
    if facts.always_allowed:
        return "removed"
    if not is_square:
        return "kept"
    if facts.exactly_causal or (causal and facts.within_causal):
        return "removed" if causal else "replaced by causal"
    return "causal added" if facts.implies_causal and not causal else "kept"


def _apply(call: Node, change: Change, positions: dict[str, int]) -> None:
    if change in ("removed", "replaced by causal"):
        _set_argument(call, "bias", None, positions)
    if change in ("replaced by causal", "causal added"):
        _set_argument(call, "causal", True, positions)


def _set_argument(call: Node, name: str, value: Any, positions: dict[str, int]) -> None:
    if name in call.kwargs:
        call.update_kwarg(name, value)
    else:
        call.update_arg(positions[name], value)


def _operand_positions(call: Node) -> dict[str, int] | None:
    """The position of each argument by name, where the node is an attention call."""
    attention = torch.ops.streambp.attention.default
    backward = torch.ops.streambp.attention_backward.default
    if call.op != "call_function" or call.target not in (attention, backward):
        return None
    schema = op_of(call)._schema
    return {argument.name: position for position, argument in enumerate(schema.arguments)}


def _is_square(arguments: dict[str, Any]) -> bool:
    """Whether there are as many queries as keys; else "causal" would not say which rows match."""
    query, key = arguments["query"].meta["val"], arguments["key"].meta["val"]
    return statically_known_true(query.shape[-2] == key.shape[-2])


def _erase_unused(masks: Iterable[Node]) -> None:
    """Erase the masks without users, and then what only they used."""
    pending = dict.fromkeys(masks)
    while pending:
        unused, _ = pending.popitem()
        if not unused.users and unused.op == "call_function" and not unused.is_impure():
            pending.update(dict.fromkeys(unused.all_input_nodes))
            unused.graph.erase_node(unused)

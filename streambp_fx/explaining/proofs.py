"""What is known of each attention's mask, and how it became known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

from ..passes.axes import ATTENTION, attention_arguments
from ..passes.causal_masks import MaskReport
from ..passes.pipeline import History
from ..passes.placement import source_of


@dataclass(frozen=True)
class AttentionProof:
    """One attention call of the forward pass.

    causal
        Whether a query is known to see no later key, so that chunks stream over prefixes.
    structure
        What is proven of the mask, in words.
    window
        Every allowed key has ``k > q - window``, if such a number was found.
    mask
        The user's line that made the mask; ``None`` without one.
    source
        The user's line of the attention.
    """

    name: str
    causal: bool
    structure: str
    window: int | None
    mask: str | None
    source: str


def attention_proofs(history: History) -> list[AttentionProof]:
    """The attention calls of a graph, in the order in which they run."""
    normal = history.graphs.get("normalized")
    if normal is None:
        return []
    reports = {report.attention: report for report in history.masks}
    return list(_proofs(normal, reports))


def _proofs(graph_module: GraphModule, reports: dict[str, MaskReport]) -> Iterator[AttentionProof]:
    for node in graph_module.graph.nodes:
        if node.target is not ATTENTION:
            continue
        given = attention_arguments(node)
        causal = given["causal"] is True
        report = reports.get(node.name)
        yield AttentionProof(
            node.name,
            causal,
            _structure(causal, given["bias"] is not None, report),
            None if report is None else report.facts.window,
            None if report is None else report.source,
            source_of(node),
        )


def _structure(causal: bool, has_mask: bool, report: MaskReport | None) -> str:
    if report is None:
        return "causal: the call says so" if causal else "no mask: keys and values are needed whole"
    if not has_mask:
        if causal:
            return "causal: proven equal to k <= q, so that no mask is built"
        return "the mask is proven to do nothing: keys and values are needed whole"
    because = report.facts.reason
    if causal:
        return f"causal: every allowed key is proven k <= q; the mask stays, since {because}"
    return f"not proven causal, so that keys and values are needed whole: {because}"

"""What is reported of an op that could not be streamed."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .placement import source_of


@dataclass(frozen=True)
class Barrier:
    """An op that could not be streamed: what, where, why, and the bytes that it costs.

    ``backward`` is whether it depends on a tangent: its source line is that of the forward op whose
    gradient it computes.
    """

    op: str
    source: str
    reason: str
    bytes: int = 0
    backward: bool = False

    @classmethod
    def at(cls, node: Node, reason: str, size: int = 0, *, backward: bool = False) -> Barrier:
        """The barrier that ``node`` is, which costs ``size`` bytes."""
        return cls(str(node.target), source_of(node), reason, size, backward)

    def __str__(self) -> str:
        return f"{self.op}: {self.reason} ({self.source})"

"""What the last compilation streamed, and what it could not."""

from __future__ import annotations

from dataclasses import dataclass

from .passes.axes import Barrier
from .passes.loops import LoopSpec
from .passes.pipeline import History


@dataclass(frozen=True)
class Report:
    """The outcome of one compilation.

    barriers
        Ops that run whole, with the user's source line and the reason.
    loops
        The loops, in the order in which they run.
    unstreamed
        Why nothing was streamed, or ``None``.
    seconds
        Time of each pass.
    notes
        Attention that stays written out, and choices of kernels that are not honoured.
    head_fused
        Whether forward and backward of the head are one loop, which computes the logits once.
        They are two where the gradient of a token waits for a sum over all of them.
    """

    barriers: tuple[Barrier, ...]
    loops: tuple[LoopSpec, ...]
    unstreamed: str | None
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    head_fused: bool = False

    @classmethod
    def of(cls, history: History) -> Report:
        """The report of one run of the passes."""
        return cls(
            tuple(history.barriers),
            tuple(history.loops),
            history.unstreamed,
            dict(history.seconds),
            tuple(history.notes),
            history.head_fused,
        )

    def problems(self) -> list[str]:
        """One line for each thing that is not streamed."""
        lines = [str(barrier) for barrier in self.barriers]
        return [self.unstreamed, *lines] if self.unstreamed else lines


_last: list[Report] = []


def record(report: Report) -> None:
    """Remember ``report`` as the last one."""
    _last[:] = [report]


def last_report() -> Report | None:
    """The report of the last graph that ``backend="streambp"`` compiled in this process."""
    return _last[0] if _last else None

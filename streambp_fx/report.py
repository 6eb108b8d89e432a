"""What the last compilation streamed, and what it could not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .passes.barrier import Barrier
from .passes.history import distinct
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
        Why nothing was streamed though something is large, or ``None``.
    seconds
        Time of each pass.
    notes
        Attention that stays written out, and choices of kernels that are not honoured.
    head_fused
        Whether forward and backward of the head are one loop, which computes the logits once.
        They are two where the gradient of a token waits for a sum over all of them.
    tokens
        The length of the sequence axis in the traced example; 0 where there is none.
    segments
        For each segment of the program in order, which of the distinct graphs it is: ``(0, 1, 1,
        2)`` for a model of two equal layers. Of a program without a waist, ``(0,)``.
    """

    barriers: tuple[Barrier, ...]
    loops: tuple[LoopSpec, ...]
    unstreamed: str | None
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    head_fused: bool = False
    tokens: int = 0
    segments: tuple[int, ...] = ()

    @classmethod
    def of(cls, captured: History, segments: Sequence[History] = ()) -> Report:
        """The report of one compilation.

        Args:
            captured: what the passes on Dynamo's graph found.
            segments: what was found in each segment, in order; equal ones share it.
        """
        shared = distinct(segments)
        parts = [one for one, _ in shared]
        which = {number: i for i, (_, numbers) in enumerate(shared) for number in numbers}
        every = [captured, *parts]
        seconds: dict[str, float] = {}
        for one in every:
            for name, spent in one.seconds.items():
                seconds[name] = seconds.get(name, 0.0) + spent
        barriers = [barrier for one in every for barrier in one.barriers]
        whole = [one.unstreamed for one in parts if one.unstreamed is not None]
        if len(whole) < len(parts):
            barriers += [Barrier("a segment", "", reason) for reason in whole]
            whole = []
        return cls(
            tuple(barriers),
            tuple(_loops(segments)),
            next((one for one in (captured.unstreamed, *whole) if one is not None), None),
            seconds,
            tuple(note for one in every for note in one.notes),
            any(one.head_fused for one in parts),
            max((one.tokens for one in parts), default=0),
            tuple(which[number] for number in range(len(segments))),
        )

    def problems(self) -> list[str]:
        """One line for each thing that is not streamed."""
        lines = [str(barrier) for barrier in self.barriers]
        return [self.unstreamed, *lines] if self.unstreamed else lines

    def summary(self) -> str:
        """One line: what was streamed, in how many loops, and what was not."""
        if self.unstreamed is not None:
            return f"streamed nothing: {self.unstreamed}"
        if not self.loops and not self.barriers:
            return "nothing to stream"
        chunks = sorted({loop.chunk_size for loop in self.loops if not loop.head})
        heads = sorted({loop.chunk_size for loop in self.loops if loop.head})
        parts = [f"streamed {self.tokens} tokens in {_count(len(self.loops), 'loop')}"]
        if len(self.segments) > 1:
            alike = f", {len(set(self.segments))} of them distinct"
            parts[0] += f" of {len(self.segments)} segments{alike}"
        if chunks:
            parts.append(f"chunks of {' and '.join(map(str, chunks))} tokens")
        if heads:
            fused = ", forward and backward in one loop" if self.head_fused else ""
            parts.append(f"the head in chunks of {' and '.join(map(str, heads))}{fused}")
        left = len(self.barriers)
        parts.append(f"{_count(left, 'op')} left unstreamed" if left else "all streamed")
        parts.append(f"{sum(self.seconds.values()):.1f} s of passes")
        return "; ".join(parts)

    def details(self) -> list[str]:
        """A line for each loop, unstreamed op, note and pass."""
        loops = [
            f"loop {loop.name}: chunks of {loop.chunk_size} tokens, "
            f"{'last to first' if loop.descending else 'first to last'}"
            f"{', the head' if loop.head else ''}"
            for loop in self.loops
        ]
        barriers = [f"unstreamed: {barrier}" for barrier in self.barriers]
        passes = [f"pass {name}: {seconds:.2f} s" for name, seconds in self.seconds.items()]
        return [*loops, *barriers, *self.notes, *passes]


def _loops(segments: Sequence[History]) -> list[LoopSpec]:
    """The loops of all segments, in the order in which they run."""
    first = {number: numbers[0] for _, numbers in distinct(segments) for number in numbers}
    in_order = list(enumerate(segments))
    return [
        loop.of_later_segment(number - first[number])
        for backward, order in ((False, in_order), (True, in_order[::-1]))
        for number, one in order
        for loop in one.loops
        if loop.place.backward is backward
    ]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


_last: list[Report] = []


def record(report: Report) -> None:
    """Remember ``report`` as the last one."""
    _last[:] = [report]


def last_report() -> Report | None:
    """The report of the last graph that ``backend="streambp"`` compiled in this process."""
    return _last[0] if _last else None

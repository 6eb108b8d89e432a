"""A plan as a picture: peak against length, for each way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plan import Plan
from .setting import GIB

SHORTEST = 1 / 16
"""Where the picture begins, as a share of the shortest of the longest rows."""
POINTS = 200


def save_plot(plan: Plan, path: Path) -> None:
    """Write ``plan`` as a picture, in the format of ``path``'s suffix.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a format that matplotlib does not know.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    first = max(1, int(SHORTEST * min(way.longest or way.curve[-1][0] for way in plan.ways)))
    last = max(2 * first, *(way.curve[-1][0] for way in plan.ways))
    for way in plan.ways:
        lengths, peaks = zip(*_between(way.curve, first), strict=True)
        label = f"{way.way}, up to {way.longest:,}" if way.longest else f"{way.way}, never"
        axes.plot(lengths, [peak / GIB for peak in peaks], label=label)
    setting = plan.setting
    limit = f"for tensors, {setting.budget / GIB:g} of {setting.memory_gib:g} GiB"
    axes.axhline(setting.budget / GIB, color="black", linestyle="--", linewidth=1, label=limit)
    # Ways differ by tens of times in the lengths that fit.
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    axes.set_ylim(0, 1.4 * setting.budget / GIB)  # the legend is above the limit
    _round_ticks(axes.xaxis)
    axes.grid(alpha=0.2)
    axes.set_xlabel("tokens in each row")
    axes.set_ylabel("peak, GiB")
    axes.set_title(f"{plan.model}: {setting}")
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(path)


def _between(curve: Sequence[tuple[int, int]], first: int) -> list[tuple[float, float]]:
    """The curve from ``first`` on, straight between its points, which a log axis would bend."""
    step = (curve[-1][0] / first) ** (1 / POINTS)
    lengths = [first * step**index for index in range(POINTS + 1)] if step > 1 else []
    found = []
    for (start, low), (end, high) in itertools.pairwise(curve):
        inside = [tokens for tokens in lengths if start <= tokens < end]
        found += [
            (tokens, low + (high - low) * (tokens - start) / (end - start)) for tokens in inside
        ]
    return [*found, (float(curve[-1][0]), float(curve[-1][1]))]


def _round_ticks(axis: Any) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = axis.get_view_interval()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    rounds = [factor * 10**power for power in powers for factor in (1, 2, 5)]
    axis.set_major_locator(FixedLocator([tick for tick in rounds if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.0f}")

"""A plan as a picture: peak against length, for each way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .plan import Plan
from .setting import GIB


def save_plot(plan: Plan, path: Path) -> None:
    """Write ``plan`` as a picture, in the format of ``path``'s suffix.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a format that matplotlib does not know.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for way in plan.ways:
        lengths, peaks = zip(*way.curve, strict=True)
        label = f"{way.way}, up to {way.longest:,}" if way.longest else f"{way.way}, never"
        axes.plot(lengths, [peak / GIB for peak in peaks], label=label)
    axes.axhline(plan.setting.budget / GIB, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.25 * plan.setting.budget / GIB)
    axes.set_xlabel("tokens in each row")
    axes.set_ylabel("peak, GiB")
    axes.set_title(f"{plan.model}: {plan.setting}")
    axes.legend()
    figure.savefig(path)

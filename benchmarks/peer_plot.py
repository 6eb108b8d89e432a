"""The peers' picture: peak against length, and time against peak."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from .peer_table import MIB, Row

Points = list[tuple[float, float]]
Style = dict[str, Any]

OURS = ("#a50f15", "#e31a1c", "#fb8072")
"""Reds, which no peer has."""
PEERS = (
    *("#444444", "#b0b0b0", "#8dc0e0", "#2f5d8a", "#3f7f5f"),
    *("#9cc5a1", "#5e3c99", "#a08a3c", "#d3b87e"),
)
COINCIDES = 0.03
"""By how much, of their values, two lines may differ at a length and still hide each other."""
LABEL = 0.5
"""Decades of the peak that a label takes at most."""


def save_plot(rows: list[Row], path: Path) -> None:
    """Draw what ``rows`` have and write ``path``, a picture. Without times it has one panel.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = peaks_by_length(rows)
    styles = _styles(lines)
    times = time_and_peak(rows)
    panels = 2 if times else 1
    figure, axes = plt.subplots(
        1, panels, figsize=(2.5 + 4.5 * panels, 4.5), layout="constrained", squeeze=False
    )
    _draw_memory(axes[0, 0], lines, styles)
    if times:
        _draw_times(axes[0, 1], times, quartiles(rows), styles)
    figure.legend(loc="outside right upper", fontsize="small", handlelength=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _styles(lines: dict[str, Points]) -> dict[str, Style]:
    """How each peer's line looks: strong and wide if it is ours, dashed if it lies on another."""
    ours, peers = zip(itertools.cycle(OURS), itertools.cycle("o^s")), itertools.cycle(PEERS)
    styles: dict[str, Style] = {}
    for peer, points in lines.items():
        if _is_ours(peer):
            color, marker = next(ours)
            styles[peer] = {"color": color, "marker": marker, "linewidth": 2.5, "zorder": 3}
        else:
            styles[peer] = {"color": next(peers), "marker": ".", "linewidth": 1.6}
        if any(_coincide(points, lines[other]) for other in styles if other != peer):
            styles[peer]["linestyle"] = (0, (3, 3))
    return styles


def _is_ours(peer: str) -> bool:
    return peer.startswith("streambp") and "==" not in peer


def _coincide(points: Points, others: Points) -> bool:
    """Whether one line hides the other at most of the lengths that both have."""
    known = dict(others)
    pairs = [(size, known[tokens]) for tokens, size in points if tokens in known]
    hidden = sum(abs(one - two) <= COINCIDES * two for one, two in pairs)
    return 2 * hidden > len(pairs)


def _draw_memory(axes: Any, lines: dict[str, Points], styles: dict[str, Style]) -> None:
    for peer, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=peer, **styles[peer])
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="peak of a step, MiB", title="Memory"
    )
    lengths = sorted({tokens for points in lines.values() for tokens, _ in points})
    axes.set_xticks(lengths, [f"{tokens:,g}" for tokens in lengths])
    axes.set_xticks([], minor=True)
    _few_ticks(axes.yaxis)
    axes.grid(alpha=0.2)


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,g}")


def _draw_times(
    axes: Any,
    times: dict[str, tuple[float, float]],
    spreads: dict[str, tuple[float, float]],
    styles: dict[str, Style],
) -> None:
    peaks = [peak for peak, _ in times.values()]
    for peer, (peak, ratio) in times.items():
        lower, upper = spreads[peer]
        look = {"color": styles[peer]["color"], "marker": styles[peer]["marker"].replace(".", "o")}
        axes.errorbar(peak, ratio, [[ratio - lower], [upper - ratio]], capsize=2, **look)
        others = [(at, *spreads[other]) for other, (at, _) in times.items() if other != peer]
        inwards = "right" if peak < math.sqrt(min(peaks) * max(peaks)) else "left"
        _label(axes, peer, peak, ratio, upper, _free_side(peak, ratio, others, inwards))
    axes.set(
        xscale="log",
        xlabel="peak of a step, MiB",
        ylabel="time, gradient checkpointing = 1\nmedian and quartiles",
        title="Time and memory",
    )
    _few_ticks(axes.xaxis)
    axes.set_xlim(min(peaks) / 10**LABEL, max(peaks) * 10 ** (LABEL / 2))
    axes.axhline(1.0, color="grey", linewidth=0.8, zorder=0)


def _free_side(
    peak: float, ratio: float, others: list[tuple[float, float, float]], inwards: str
) -> str:
    """Where a label meets no bar, ``(peak, lower, upper)``: inwards if that is so, or above."""

    def is_free(side: str) -> bool:
        sign = 1 if side == "right" else -1
        return not any(
            0 < sign * math.log10(at / peak) < LABEL and lower - 0.01 < ratio < upper + 0.01
            for at, lower, upper in others
        )

    outwards = "left" if inwards == "right" else "right"
    return next((side for side in (inwards, outwards) if is_free(side)), "above")


def _label(axes: Any, text: str, peak: float, ratio: float, upper: float, side: str) -> None:
    if side == "above":
        place: Style = {"xy": (peak, upper), "xytext": (0, 3), "ha": "center", "va": "bottom"}
    else:
        sign, end = (1, "left") if side == "right" else (-1, "right")
        place = {"xy": (peak, ratio), "xytext": (7 * sign, 0), "ha": end, "va": "center"}
    axes.annotate(text, **place, textcoords="offset points", fontsize=8)


def peaks_by_length(rows: list[Row]) -> dict[str, Points]:
    """For each peer, ``(tokens, MiB)`` on the model that most measurements are of, by length.

    Ways at a single length are left out where others have several.
    """
    lines: dict[str, Points] = {}
    for row in _on_main_model(rows, "memory"):
        point = (row["job"]["tokens"], row["result"]["peak"] / MIB)
        lines.setdefault(row["peer"], []).append(point)
    several = max(map(len, lines.values()), default=0) > 1
    return {
        peer: sorted(points) for peer, points in lines.items() if len(points) > 1 or not several
    }


def time_and_peak(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """For each peer, ``(MiB, median ratio of time)`` at its longest length that has both."""
    return {peer: (peak, ratio["median"]) for peer, (peak, ratio) in _ratios(rows).items()}


def quartiles(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """For each peer of `time_and_peak`, the lower and the upper quartile of the ratio of time."""
    return {peer: (ratio["lower"], ratio["upper"]) for peer, (_, ratio) in _ratios(rows).items()}


def _ratios(rows: list[Row]) -> dict[str, tuple[float, dict[str, float]]]:
    peaks = {peer: dict(points) for peer, points in peaks_by_length(rows).items()}
    found: dict[str, tuple[float, dict[str, float]]] = {}
    for row in sorted(_on_main_model(rows, "time"), key=lambda row: row["job"]["tokens"]):
        peak = peaks.get(row["peer"], {}).get(row["job"]["tokens"])
        if peak is not None:
            found[row["peer"]] = (peak, row["result"]["ratio"])
    return found


def _on_main_model(rows: list[Row], part: str) -> list[Row]:
    """The rows of ``part`` that have a result, of the commonest layers and vocabulary, SFT only."""
    measured = [
        row
        for row in rows
        if row["result"] is not None
        and row["job"]["part"] == part
        and row["job"]["objective"] not in ("dpo", "grpo")
    ]
    models = [_model(row["job"]) for row in measured]
    return [row for row in measured if _model(row["job"]) == max(models, key=models.count)]


def _model(job: dict[str, Any]) -> tuple[int, int]:
    return job["layers"], job["vocabulary"]

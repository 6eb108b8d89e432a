"""The peers' picture: peak against length, and time against peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .peer_table import MIB, Row

Points = list[tuple[float, float]]


def save_plot(rows: list[Row], path: Path) -> None:
    """Draw what ``rows`` have and write ``path``, a picture. Without times it has one panel.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = peaks_by_length(rows)
    colors = {peer: plt.colormaps["tab20"](index % 20) for index, peer in enumerate(lines)}
    times = time_and_peak(rows)
    panels = 2 if times else 1
    figure, axes = plt.subplots(
        1, panels, figsize=(2.5 + 4.5 * panels, 4.5), layout="constrained", squeeze=False
    )
    _draw_memory(axes[0, 0], lines, colors)
    if times:
        _draw_times(axes[0, 1], times, colors)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_memory(axes: Any, lines: dict[str, Points], colors: dict[str, Any]) -> None:
    for peer, points in lines.items():
        ours = peer.startswith("streambp") and "==" not in peer
        axes.plot(
            *zip(*points, strict=True),
            marker="o" if ours else ".",
            label=peer,
            color=colors[peer],
            linewidth=2.5 if ours else 1.2,
        )
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="peak of a step, MiB", title="Memory"
    )
    lengths = sorted({tokens for points in lines.values() for tokens, _ in points})
    axes.set_xticks(lengths, [f"{tokens:g}" for tokens in lengths])
    axes.set_xticks([], minor=True)
    _few_ticks(axes.yaxis)
    axes.grid(alpha=0.2)


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _draw_times(axes: Any, times: dict[str, tuple[float, float]], colors: dict[str, Any]) -> None:
    for peer, (peak, ratio) in times.items():
        axes.scatter(peak, ratio, color=colors[peer])
        axes.annotate(peer, (peak, ratio), xytext=(5, 3), textcoords="offset points", fontsize=8)
    axes.set(
        xscale="log",
        xlabel="peak of a step, MiB",
        ylabel="time, gradient checkpointing = 1",
        title="Time and memory",
    )
    _few_ticks(axes.xaxis)
    axes.margins(x=0.25)
    axes.axhline(1.0, color="grey", linewidth=0.8)


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
    peaks = {peer: dict(points) for peer, points in peaks_by_length(rows).items()}
    found: dict[str, tuple[float, float]] = {}
    for row in sorted(_on_main_model(rows, "time"), key=lambda row: row["job"]["tokens"]):
        peak = peaks.get(row["peer"], {}).get(row["job"]["tokens"])
        if peak is not None:
            found[row["peer"]] = (peak, row["result"]["ratio"]["median"])
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

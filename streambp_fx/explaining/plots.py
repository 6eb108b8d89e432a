"""The memory over one step as a figure: by term with this backend, and in the other ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .data import changing_moments, thinned, visible_terms
from .terms import Term
from .units import bytes_text, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .explanation import Explanation

# Okabe and Ito's colours, which those with colour blindness can tell apart, and two greys.
COLORS = {
    Term.LAYER_INPUTS: "#0072b2",
    Term.RESIDUAL_GRADIENT: "#56b4e9",
    Term.KEYS_VALUES: "#009e73",
    Term.KEY_VALUE_GRADIENTS: "#8fd3b6",
    Term.PARAMETER_GRADIENTS: "#b0b0b0",
    Term.CHUNK: "#e69f00",
    Term.HEAD: "#f0e442",
    Term.WEIGHTS: "#cc79a7",
    Term.PROLOGUE: "#6b6b6b",
    Term.UNSTREAMED: "#d62728",
}
PEER_COLORS = ("#d55e00", "#8c564b", "#7f3c8d")
OURS = "#0072b2"


def plot_memory(explanation: Explanation) -> Figure:
    """Two panels: our step stacked by term, and below it the other ways beside ours.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'streambp-fx[plot]'") from error
    before = bool(explanation.peer_courses)
    figure = Figure(figsize=(10, 8 if before else 4.5), layout="constrained")
    axes = figure.subplots(2 if before else 1, 1, squeeze=False)[:, 0]
    figure.suptitle(explanation.program, fontsize=10)
    _plot_terms(axes[0], explanation)
    if before:
        _plot_peers(axes[1], explanation)
    return figure


def _plot_terms(axes: Axes, explanation: Explanation) -> None:
    moments = changing_moments(explanation)
    places = range(len(moments))
    by_term = [moment.terms() for moment in moments]
    terms = visible_terms(moments)
    peak = explanation.peak
    unit, unit_name = unit_of(peak.nbytes)
    heights = [[terms.get(term, 0) / unit for terms in by_term] for term in terms]
    axes.stackplot(
        places,
        heights,
        labels=[str(term) for term in terms],
        colors=[COLORS[term] for term in terms],
        step="post",
    )
    at = max(places, key=lambda index: moments[index].nbytes)
    axes.annotate(
        f"peak {bytes_text(peak.nbytes)}, at {peak.node}",
        (at, peak.nbytes / unit),
        xytext=(0, 8),
        textcoords="offset points",
        ha="right" if at > len(moments) / 2 else "left",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
    turn = next((index for index, moment in enumerate(moments) if moment.backward), None)
    if turn is not None:
        axes.axvline(turn, color="black", linewidth=0.8, linestyle=":")
        axes.text(
            turn, 1.0, " backward", transform=axes.get_xaxis_transform(), va="top", fontsize=8
        )
    axes.set(
        title='with backend="streambp"',
        xlabel="ops and loops of the step, in order (not to the scale of time)",
        ylabel=f"{unit_name} above the step's start",
        xlim=(0, max(1, len(moments))),
        ylim=(0, 1.15 * max(1e-9, peak.nbytes / unit)),
    )
    # Top first, as the stack is seen.
    axes.legend(reverse=True, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plot_peers(axes: Axes, explanation: Explanation) -> None:
    courses = explanation.peer_courses
    highest = max([explanation.peak.nbytes, *map(max, courses.values())])
    unit, unit_name = unit_of(highest)
    for color, (name, course) in zip(PEER_COLORS, courses.items(), strict=False):
        peak = explanation.peers[name]
        label = f"{name}: {bytes_text(peak)}" if isinstance(peak, int) else name
        _plot_course(axes, thinned(course), label, color, unit)
    ours = thinned([moment.nbytes for moment in changing_moments(explanation)])
    label = f'backend="streambp": {bytes_text(explanation.peak.nbytes)}'
    _plot_course(axes, ours, label, OURS, unit)
    axes.set(
        title="the same step in other ways",
        xlabel="share of the step's allocations (not to the scale of time)",
        ylabel=f"{unit_name} above the step's start",
        xlim=(0, 1),
        ylim=(0, None),
    )
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plot_course(axes: Axes, course: list[int], label: str, color: str, unit: int) -> None:
    last = max(1, len(course) - 1)
    axes.plot(
        [index / last for index in range(len(course))],
        [size / unit for size in course],
        label=label,
        color=color,
        linewidth=1.5,
    )

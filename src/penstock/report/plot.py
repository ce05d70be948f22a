"""Schedules and timelines in matplotlib's axes, for a notebook's or a paper's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import require
from penstock.report.colors import DARK, LIGHT, WORDS, Kind, Theme, contrast, ink, shade
from penstock.report.marks import MAX_MARKS, Axis, Mark, has_chunks, longest_label, marks, runs
from penstock.report.svg import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HIGH = 0.86
"""The height of a rank's bar, in ranks."""
_COLUMNS = 2000
"""Of a timeline with more than `MAX_MARKS` actions."""


def plot(panel: Panel, axes: Axes | None = None, *, unit: str = "s") -> Axes:
    """Draws a timeline into axes, new ones by default, whose horizontal axis is in seconds of the timeline.

    The colors suit the axes' background, light or dark.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("plot", "matplotlib", for_what="plot()")
    from matplotlib.patches import Patch

    timeline = panel.timeline
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(figsize=(9.6, 1.1 + 0.24 * timeline.ranks), layout="constrained")
    theme, axis = _theme(axes), Axis.of(timeline.makespan_seconds, unit)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=theme.ink, parse_math=False)
    axes.set_xlim(0, timeline.makespan_seconds or 1)
    axes.set_xticks([second for second, _ in axis.ticks], [text for _, text in axis.ticks])
    axes.set_xlabel(axis.unit, fontsize=9, color=theme.muted)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_ylim(max(1, timeline.ranks) - 0.5, -0.5)
    axes.tick_params(labelsize=8.5, labelcolor=theme.muted, color=theme.muted)
    axes.spines[:].set_visible(False)
    used, few, column = set[Kind](), len(timeline) <= MAX_MARKS, timeline.makespan_seconds / _COLUMNS
    for rank in range(timeline.ranks):
        axes.broken_barh([(0, timeline.makespan_seconds)], (rank - _HIGH / 2, _HIGH), facecolors=theme.fills[Kind.WAIT])
        if not few:
            most = runs(timeline.tracks[rank], column, _COLUMNS)
            used.update(kind for *_, kind in most)
            spans = [(first * column, (end - first) * column) for first, end, _ in most]
            fills = [theme.fills[kind] for *_, kind in most]
            axes.broken_barh(spans, (rank - _HIGH / 2, _HIGH), facecolors=fills, linewidth=0)
            continue
        found = [*marks(timeline, rank, panel.slices)]
        used.update(mark.kind for mark in found)
        _bars(axes, [mark for mark in found if mark.kind is not Kind.COMMUNICATION], rank - _HIGH / 2, _HIGH, theme)
        # Messages are thin, and lie over what the rank computes meanwhile.
        _bars(axes, [mark for mark in found if mark.kind is Kind.COMMUNICATION], rank + _HIGH / 4, _HIGH / 4, theme)
        _labels(axes, found, rank, theme, longest_label(timeline, panel.slices))
    handles = [Patch(color=theme.fills[kind], label=WORDS[kind]) for kind in Kind if kind in used]
    handles.append(Patch(color=theme.fills[Kind.WAIT], label="idle"))
    if not few:
        handles.append(Patch(alpha=0, label="where narrow: what a rank does most"))
    elif has_chunks(timeline):
        handles.append(Patch(alpha=0, label=f"lighter: {panel.lighter}"))
    below: Any = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 3.4, "ncols": len(handles)}
    axes.legend(handles=handles, labelcolor=theme.muted, frameon=False, fontsize=8.5, handlelength=1, **below)
    return axes


def _theme(axes: Axes) -> Theme:
    from matplotlib.colors import to_hex

    face, figure = axes.get_facecolor(), axes.get_figure()
    if len(face) == 4 and face[3] == 0 and figure is not None:
        face = figure.get_facecolor()
    return DARK if contrast(to_hex(face), "#ffffff") > contrast(to_hex(face), "#000000") else LIGHT


def _bars(axes: Axes, found: Sequence[Mark], bottom: float, high: float, theme: Theme) -> None:
    spans = [(mark.start, mark.end - mark.start) for mark in found]
    fills = [shade(theme, mark.kind, mark.chunk, mark.microbatch) for mark in found]
    axes.broken_barh(spans, (bottom, high), facecolors=fills, linewidth=0)


def _labels(axes: Axes, found: Sequence[Mark], rank: int, theme: Theme, letters: int) -> None:
    """The microbatches, where they fit: a digit is 0.64 of its size wide."""
    figure, (low, high) = axes.get_figure(root=True), axes.get_xlim()
    points = axes.get_window_extent().width * 72 / figure.dpi / (high - low) if figure is not None else 0.0
    for mark in found:
        size = min(8.5, (mark.end - mark.start) * points / (0.72 * letters))
        if mark.kind is not Kind.COMMUNICATION and size >= 5.5:
            look: Any = {"ha": "center", "va": "center_baseline", "clip_on": True, "in_layout": False}
            color = ink(theme, mark.kind, mark.chunk)
            axes.text((mark.start + mark.end) / 2, rank, mark.label, color=color, fontsize=size, **look)

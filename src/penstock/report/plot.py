"""Schedules and timelines drawn by matplotlib: into a notebook's or a paper's axes, and as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import require
from penstock.report.colors import DARK, LIGHT, WORDS, Kind, Theme, contrast, ink, shade
from penstock.report.marks import MAX_MARKS, Axis, Mark, has_chunks, longest_label, marks, runs
from penstock.report.svg import Panel
from penstock.schedule.action import OPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2000
"""How finely time is divided where there are too many actions to draw each."""
_HIGH = 0.86
"""The height of a rank's bar, in ranks."""


def plot(panel: Panel, axes: Axes | None = None, *, unit: str = "s") -> Axes:
    """Draws a timeline into axes, new ones by default, whose horizontal axis is in seconds of the timeline.

    The colors suit the axes' background, light or dark.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("plot", "matplotlib", for_what="plot()")
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(figsize=_inches(panel, 960), layout="constrained")
    drawn = _draw(panel, axes, unit)
    _legend(axes, _theme(axes), [panel])
    return drawn


def write_png(
    panels: Sequence[Panel], path: str | Path, *, unit: str = "s", dark: bool = False, width: int = 960
) -> None:
    """Writes timelines as PNG, under each other on one axis of time, with two dots to each of the picture's pixels.

    Raises:
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require("plot", "matplotlib", for_what="pictures as PNG")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    theme = DARK if dark else LIGHT
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    heights = [0.35 + _rows(panel) for panel in panels]
    figure = Figure(figsize=(width / 100, _REST - 0.35 + sum(heights)), layout=layout, facecolor=theme.page)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(panels), height_ratios=heights)
    every = [figure.add_subplot(grid[place], facecolor=theme.page) for place in range(len(panels))]
    longest = max(panel.timeline.makespan_seconds for panel in panels)
    for panel, axes in zip(panels, every, strict=True):
        _draw(panel, axes, unit, longest)
        if axes is not every[-1]:
            axes.set_xticks([])
            axes.set_xlabel("")
    _legend(every[-1], theme, panels)
    figure.savefig(path, format="png", dpi=200)


_REST = 1.05
"""The height of a picture's title, axis and legend, in inches."""


def _inches(panel: Panel, width: int) -> tuple[float, float]:
    """The size of a figure of so many pixels, of which 100 are an inch."""
    return width / 100, _REST + _rows(panel)


def _rows(panel: Panel) -> float:
    """The height of a panel's ranks, in inches."""
    ranks = panel.timeline.ranks
    return (0.24 if ranks <= 16 else 0.17 if ranks <= 32 else 0.11) * max(1, ranks)


def _draw(panel: Panel, axes: Axes, unit: str, longest: float | None = None) -> Axes:
    """The ranks and the axis of time, up to `longest` seconds; by default to the timeline's end."""
    timeline, theme = panel.timeline, _theme(axes)
    few = _few(panel)
    found = [[*marks(timeline, rank, panel.slices)] for rank in range(timeline.ranks)] if few else []
    _frame(panel, axes, theme, unit, timeline.makespan_seconds if longest is None else longest)
    for rank, track in enumerate(timeline.tracks):
        bar = (rank - _HIGH / 2, _HIGH)
        _rectangles(axes, [(0.0, timeline.makespan_seconds)], bar, [theme.fills[Kind.WAIT]])
        if not few:
            unit_seconds = timeline.makespan_seconds / _COLUMNS
            parts = runs(track, unit_seconds, _COLUMNS)
            spans = [(first * unit_seconds, (end - first) * unit_seconds) for first, end, _ in parts]
            _rectangles(axes, spans, bar, [theme.fills[kind] for *_, kind in parts])
    if few and len(timeline):
        pixel, letters = _pixel(axes), longest_label(timeline, panel.slices)
        for rank, of_rank in enumerate(found):
            _bars(of_rank, rank, axes, theme, pixel)
            _labels(of_rank, rank, axes, theme, pixel * letters)
    return axes


def _few(panel: Panel) -> bool:
    """Whether each action is drawn."""
    return len(panel.timeline) <= MAX_MARKS


def _theme(axes: Axes) -> Theme:
    from matplotlib.colors import to_hex

    face = axes.get_facecolor()
    figure = axes.get_figure()
    if len(face) == 4 and face[3] == 0 and figure is not None:
        face = figure.get_facecolor()
    return DARK if contrast(to_hex(face), "#ffffff") > contrast(to_hex(face), "#000000") else LIGHT


def _rectangles(
    axes: Axes, spans: Sequence[tuple[float, float]], bar: tuple[float, float], fills: Sequence[str]
) -> None:
    # They lie within the axes, so the layout, which would look at each of them, need not.
    axes.broken_barh(spans, bar, facecolors=fills, linewidth=0).set_in_layout(False)


def _bars(found: Sequence[Mark], rank: int, axes: Axes, theme: Theme, pixel: float) -> None:
    """A bar for each action; messages are thin and lie over what the rank computes meanwhile."""
    for strip in (False, True):
        shown = [mark for mark in found if (mark.kind is Kind.COMMUNICATION) is strip]
        bar = (rank + _HIGH / 4, _HIGH / 4) if strip else (rank - _HIGH / 2, _HIGH)
        spans = [(mark.start, max(mark.end - mark.start - pixel, 0.85 * (mark.end - mark.start))) for mark in shown]
        fills = [shade(theme, mark.kind, mark.chunk, mark.microbatch) for mark in shown]
        _rectangles(axes, spans, bar, fills)


def _labels(found: Sequence[Mark], rank: int, axes: Axes, theme: Theme, unit: float) -> None:
    """The microbatches, where they fit. `unit`: a pixel for each character of the longest label."""
    look: Any = {"ha": "center", "va": "center_baseline", "clip_on": True, "in_layout": False}
    for mark in found:
        size = min(8.5, (mark.end - mark.start) / unit)  # a digit is 0.64 of its size wide
        if mark.kind is not Kind.COMMUNICATION and size >= 5.5:
            color = ink(theme, mark.kind, mark.chunk)
            axes.text((mark.start + mark.end) / 2, rank, mark.label, color=color, fontsize=size, **look)


def _pixel(axes: Axes) -> float:
    """How many seconds of the axis are a hundredth of an inch."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # where the axes lie is known only then
    low, high = axes.get_xlim()
    return (high - low) * figure.dpi / (100 * axes.get_window_extent().width)


def _frame(panel: Panel, axes: Axes, theme: Theme, unit: str, longest: float) -> None:
    timeline = panel.timeline
    axis = Axis.of(longest, unit)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=theme.ink, parse_math=False)
    axes.set_xlim(0, longest or 1)
    axes.set_xticks([second for second, _ in axis.ticks], [text for _, text in axis.ticks])
    axes.set_xlabel(axis.unit, fontsize=9, color=theme.muted)
    every = 1 if timeline.ranks <= 32 else 4
    ranks = range(0, timeline.ranks, every)
    axes.set_yticks([*ranks], [f"rank {rank}" for rank in ranks])
    axes.set_ylim(max(1, timeline.ranks) - 0.5, -0.5)
    axes.tick_params(labelsize=8.5, labelcolor=theme.muted, color=theme.muted)
    axes.tick_params(axis="y", length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(axes: Axes, theme: Theme, panels: Sequence[Panel]) -> None:
    from matplotlib.patches import Patch

    timelines = [panel.timeline for panel in panels]
    used = {Kind.of(OPS[code]) for one in timelines for track in one.tracks for _, code in track.actions.kinds}
    notes = [] if all(map(_few, panels)) else ["where narrow: what a rank does most"]
    lighter = dict.fromkeys(panel.lighter for panel in panels if _few(panel) and has_chunks(panel.timeline))
    notes += [f"lighter: {' or '.join(lighter)}"] if lighter else []
    handles = [Patch(color=theme.fills[kind], label=WORDS[kind]) for kind in Kind if kind in used]
    handles.append(Patch(color=theme.fills[Kind.WAIT], label="idle"))
    handles += [Patch(alpha=0, label=note) for note in notes]
    from matplotlib.transforms import offset_copy

    figure = axes.get_figure(root=True)
    below = offset_copy(axes.transAxes, fig=figure, y=-32, units="points")  # where the axis' numbers and unit end
    place: Any = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
    look: Any = {"frameon": False, "fontsize": 8.5, "handlelength": 1, "handleheight": 1, "borderpad": 0}
    axes.legend(handles=handles, ncols=len(handles), labelcolor=theme.muted, borderaxespad=0, **place, **look)

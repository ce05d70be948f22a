"""Drawings of schedules and timelines in a notebook, and in matplotlib's axes for a paper's own figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock._base.errors import require
from penstock.report.colors import LIGHT, ink, shade
from penstock.report.marks import Axis, Mark, has_chunks, longest_label, marks
from penstock.report.svg import drawing_unit, make_panel, svg
from penstock.schedule import Schedule
from penstock.schedule.describe import WORDS, Kind
from penstock.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_ACTIONS = 100_000
"""Maximum number of actions to draw at once, which takes a second or two."""
_HEIGHT = 0.86
"""The height of a rank's bar, in ranks."""


def picture(drawn: Schedule | Timeline) -> str:
    """Draw a schedule in slots, or a timeline, as HTML for a notebook. Raise the errors of `make_panel`."""
    count = len(drawn) if isinstance(drawn, Timeline) else sum(map(len, drawn.rows))
    if count > _MAX_ACTIONS:
        name, unit = ("timeline", "") if isinstance(drawn, Timeline) else ("schedule", ", 'slots'")
        call = f"penstock.report.svg([penstock.report.make_panel({name})]{unit})"
        return f"<pre>{count:,} actions; {call} draws them, in a while</pre>"
    return svg([make_panel(drawn)], drawing_unit(drawn))


def plot(drawn: Schedule | Timeline, axes: Axes | None = None) -> Axes:
    """Draw into axes, new ones by default, whose horizontal axis is in slots or in seconds of the timeline.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ScheduleError: the schedule cannot be run.
    """
    require("plot", "matplotlib", for_what="plot()")
    from matplotlib.patches import Patch

    panel = make_panel(drawn)
    timeline = panel.timeline
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(figsize=(9.6, 1.1 + 0.24 * timeline.ranks), layout="constrained")
    axis = Axis.of(timeline.makespan_seconds, drawing_unit(drawn))
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
    axes.set_xlim(0, timeline.makespan_seconds or 1)
    axes.set_xticks([second for second, _ in axis.ticks], [text for _, text in axis.ticks])
    axes.set_xlabel(axis.unit, fontsize=9)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.set_ylim(max(1, timeline.ranks) - 0.5, -0.5)
    axes.tick_params(labelsize=8.5)
    axes.spines[:].set_visible(False)
    used, letters = set[Kind](), longest_label(timeline)
    for rank in range(timeline.ranks):
        bottom = rank - _HEIGHT / 2
        axes.broken_barh([(0, timeline.makespan_seconds)], (bottom, _HEIGHT), facecolors=LIGHT.fills[Kind.WAIT])
        rank_marks = [*marks(timeline, rank)]
        used.update(mark.kind for mark in rank_marks)
        # Messages are thin, and lie over what the rank computes meanwhile.
        for thin, extent in ((False, (bottom, _HEIGHT)), (True, (bottom + 0.75 * _HEIGHT, _HEIGHT / 4))):
            selected = [mark for mark in rank_marks if (mark.kind is Kind.COMMUNICATION) == thin]
            fills = [shade(LIGHT, mark.kind, mark.chunk, mark.microbatch) for mark in selected]
            axes.broken_barh([(mark.start, mark.end - mark.start) for mark in selected], extent, facecolors=fills, lw=0)
        for mark in rank_marks:
            _label(axes, mark, rank, letters)
    handles = [Patch(color=LIGHT.fills[kind], label=WORDS[kind]) for kind in Kind if kind in used]
    handles.append(Patch(color=LIGHT.fills[Kind.WAIT], label="idle"))
    if has_chunks(timeline):
        handles.append(Patch(alpha=0, label=f"lighter: {panel.lighter}"))
    placement: Any = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 3.4, "ncols": len(handles)}
    axes.legend(handles=handles, frameon=False, fontsize=8.5, handlelength=1, **placement)
    return axes


def _label(axes: Axes, mark: Mark, rank: int, letters: int) -> None:
    """Label the microbatch where it fits: a digit is 0.64 of its size wide."""
    figure, (low, high) = axes.get_figure(root=True), axes.get_xlim()
    points = axes.get_window_extent().width * 72 / figure.dpi / (high - low) if figure is not None else 0.0
    size = min(8.5, (mark.end - mark.start) * points / (0.72 * letters))
    if mark.kind is not Kind.COMMUNICATION and size >= 5.5:
        style: Any = {"ha": "center", "va": "center_baseline", "clip_on": True, "in_layout": False}
        color = ink(LIGHT, mark.kind, mark.chunk)
        axes.text((mark.start + mark.end) / 2, rank, mark.label, color=color, fontsize=size, **style)

"""Schedules and timelines as SVG: a row a rank, lengths in proportion to time, each action's name under the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.report.colors import DARK, LIGHT, Theme, ink, shade
from penstock.report.marks import MAX_MARKS, Axis, Mark, has_chunks, longest_label, marks, merge_columns
from penstock.schedule import Action, Schedule
from penstock.schedule.describe import WORDS, Kind
from penstock.schedule.grid import slot_timeline
from penstock.schedule.timeline import Timeline

Background = Literal["auto", "light", "dark"]
"""The background of a picture; `auto` follows the setting of the reader's system."""

WIDTH = 960
"""The width of a picture in pixels, unless another is asked for."""
_SLOT_WIDTH = 30.0
"""The width of a second of the timeline, at most, in pixels: pictures of little need not be wide."""
_TITLE, _AXIS, _LEGEND, _GAP, _MARGIN = 24, 26, 26, 16, 12
_DIGIT_WIDTH = 6.8
"""The width of a digit of labels."""
_MAX_NOTEBOOK_ACTIONS = 100_000
"""Maximum number of actions that a notebook draws by itself, which takes a second or two."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A timeline to draw, with the line above it.

    Attributes:
        lighter: what has lighter colors, if a rank has several stages.
        marked: an action that is framed.
    """

    title: str
    timeline: Timeline
    lighter: str = "later chunks"
    marked: Action | None = None


def make_panel(drawn: Schedule | Timeline, timeline: Timeline | None = None, title: str | None = None) -> Panel:
    """Prepare a schedule or a timeline to be drawn, perhaps together with others.

    Args:
        timeline: when the schedule's actions ran, simulated or real; without it each F, B, I and W takes one slot.
        title: the line above; by default name, numbers and bubble.

    Raises:
        ScheduleError: the schedule cannot be run.
    """
    if isinstance(drawn, Timeline):
        ranks = f"{pluralize(drawn.ranks, 'rank')}, {Axis.of(drawn.makespan_seconds).text(drawn.makespan_seconds)}"
        return Panel(f"{ranks}; {_bubble(drawn)}" if title is None else title, drawn)
    shown = slot_timeline(drawn) if timeline is None else timeline
    if title is None:
        numbers = f"{pluralize(drawn.ranks, 'rank')}, {pluralize(drawn.microbatches, 'microbatch')}"
        title = f"{drawn.name}: {numbers}; {_bubble(shown)}"
    lighter = "the copy" if drawn.placement.pipelines > 1 else "later chunks"
    return Panel(title, shown, lighter)


def drawing_unit(drawn: Schedule | Timeline) -> str:
    """Return what a second of the drawing of a schedule or a timeline stands for."""
    return "slots" if isinstance(drawn, Schedule) else "s"


def svg(
    panels: Sequence[Panel],
    unit: str = "s",
    *,
    background: Background = "auto",
    width: int = WIDTH,
    hover: bool = True,
) -> str:
    """Draw timelines below each other on one time axis, as SVG.

    >>> from penstock.schedule import generate
    >>> svg([make_panel(generate("1f1b", ranks=2, microbatches=4))], "slots")[:4]
    '<svg'

    Args:
        unit: what the timelines' seconds stand for, if not for seconds.
        background: the background that the colors are for.
        width: in pixels, at most.
        hover: whether actions are named under the pointer, which pages do not do for pictures that are files.

    Raises:
        ArgumentError: `width` leaves no room for the actions.
    """
    if background not in ("auto", "light", "dark"):
        raise ArgumentError(f"background={background!r}: expected 'auto', 'light' or 'dark'")
    if others := [type(panel).__name__ for panel in panels if not isinstance(panel, Panel)]:
        raise ArgumentError(f"svg draws panels: pass make_panel(...) of the {others[0]}")
    drawing = _Drawing(panels, unit, width, hover)
    top, elements = float(_MARGIN), []
    for panel in panels:
        elements.append(f'<text class="title" x="{_MARGIN}" y="{top + 13:g}">{escape(panel.title)}</text>')
        elements += drawing.rows(panel, top + _TITLE)
        top += _TITLE + drawing.row * panel.timeline.ranks + _GAP
    bottom = top - _GAP
    elements += drawing.axis(bottom)
    lighter = " or ".join(dict.fromkeys(panel.lighter for panel in panels if has_chunks(panel.timeline)))
    legend, height = drawing.legend(bottom + _AXIS, lighter)
    elements += legend
    label = escape("; ".join(panel.title for panel in panels), quote=True)
    size = f'viewBox="0 0 {drawing.width:g} {height:g}" width="{drawing.width:g}" height="{height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="penstock-{background}" role="img" aria-label="{label}" {size}>'
    )
    page = f'<rect class="page" width="{drawing.width:g}" height="{height:g}" rx="6"/>'
    return "\n".join([head, f"<style>{_style(drawing.used, background)}</style>", page, *elements, "</svg>", ""])


def picture(drawn: Schedule | Timeline) -> str:
    """Draw a schedule in slots, or a timeline, as HTML for a notebook. Raise the errors of `make_panel`."""
    count = len(drawn) if isinstance(drawn, Timeline) else sum(map(len, drawn.rows))
    if count > _MAX_NOTEBOOK_ACTIONS:
        name, unit = ("timeline", "") if isinstance(drawn, Timeline) else ("schedule", ", 'slots'")
        call = f"penstock.report.svg([penstock.report.make_panel({name})]{unit})"
        return f"<pre>{count:,} actions; {call} draws them, in a while</pre>"
    return svg([make_panel(drawn)], drawing_unit(drawn))


class _Drawing:
    """The layout that all panels share, and the colors that have been used.

    Attributes:
        scale: pixels a second.
        draws_actions: whether each action is drawn.
    """

    def __init__(self, panels: Sequence[Panel], unit: str, width: int, hover: bool) -> None:
        ranks = max((panel.timeline.ranks for panel in panels), default=0)
        self.unit, self.hover = unit, hover
        self.row = 24 if ranks <= 16 else 17 if ranks <= 32 else 11
        self.longest = max((panel.timeline.makespan_seconds for panel in panels), default=0.0)
        self.left = _MARGIN + 10 + 6.4 * len(f"rank {max(0, ranks - 1)}")
        available = width - self.left - _MARGIN
        if available < 60:
            raise ArgumentError(f"width={width}: pass at least {math.ceil(self.left + _MARGIN + 60)} pixels")
        # Seconds of a clock fill the width; slots and costs keep a size in which they are easily read.
        scale = available / self.longest if self.longest else 1.0
        self.scale = scale if unit == "s" else min(_SLOT_WIDTH, scale)
        self.draws_actions = sum(len(panel.timeline) for panel in panels) <= MAX_MARKS
        text_width = max([360.0, *(2 * _MARGIN + 7.2 * len(panel.title) for panel in panels)])  # titles and legend
        self.width = max(self.left + self.longest * self.scale + _MARGIN, min(width, text_width))
        self.time_axis = Axis.of(self.longest, unit)
        self.used: set[tuple[Kind, int, int]] = set()

    def rows(self, panel: Panel, top: float) -> Iterator[str]:
        """Draw the ranks of a panel."""
        timeline = panel.timeline
        step = 1 if self.row > 11 else 4
        longest = longest_label(panel.timeline)
        for rank in range(timeline.ranks):
            y, height = top + rank * self.row, self.row - (3 if self.row > 11 else 1)
            if rank % step == 0:
                yield f'<text class="rank" x="{_MARGIN}" y="{y + height / 2 + 4:g}">rank {rank}</text>'
            length = self.scale * timeline.makespan_seconds
            yield f'<rect class="idle" x="{self.left:g}" y="{y:g}" width="{length:.4g}" height="{height:g}"/>'
            if self.draws_actions:
                for mark in marks(timeline, rank):
                    yield self._mark(mark, y, height, longest)
            else:
                yield from self._columns(timeline, rank, y, height)
            for span in [] if panel.marked is None else timeline.spans(rank):
                if span.action == panel.marked:
                    x, seconds = self.left + span.start_seconds * self.scale, span.end_seconds - span.start_seconds
                    size = f'width="{max(6.0, seconds * self.scale):.2f}" height="{height + 2:g}" rx="2"'
                    yield f'<rect class="marked" x="{x - 1:.2f}" y="{y - 1:g}" {size}/>'

    def _mark(self, mark: Mark, y: float, height: float, longest: int) -> str:
        x, width = self.left + mark.start * self.scale, (mark.end - mark.start) * self.scale
        is_message = mark.kind is Kind.COMMUNICATION  # lies over what the rank computes meanwhile
        if is_message:
            y, height = y + 0.75 * height, 0.25 * height
        gap = 1.0 if width > 6 else 0.15 * width
        corner = ' rx="2"' if width > 8 and not is_message else ""
        times = f"{self.time_axis.text(mark.start)} to {self.time_axis.text(mark.end)}"
        title = f"<title>{mark.description}: {times}</title>" if self.hover else ""
        box = f'<rect x="{x:.2f}" y="{y:g}" width="{width - gap:.2f}" height="{height:g}"{corner}/>'
        size = min(12.0, height - 3, (width - gap - 2) / longest * 12 / _DIGIT_WIDTH)
        text = ""
        if mark.label and size >= 8 and not is_message:
            middle = f'x="{x + (width - gap) / 2:.2f}" y="{y + height / 2 + 0.36 * size:.2f}"'
            text = f'<text {middle} font-size="{size:.3g}">{mark.label}</text>'
        color = (mark.kind, 0, 0) if is_message else (mark.kind, min(mark.chunk, 2), mark.microbatch % 2)
        self.used.add(color)
        return f'<g class="{"-".join(map(str, color))}">{title}{box}{text}</g>'

    def _columns(self, timeline: Timeline, rank: int, y: float, height: float) -> Iterator[str]:
        """Draw one path for each kind, a pixel at a time."""
        columns = max(1, math.ceil(timeline.makespan_seconds * self.scale))
        merged = merge_columns(timeline.tracks[rank], 1 / self.scale, columns)
        for kind in Kind:
            parts = [
                f"M{self.left + first:g} {y:g}h{end - first}v{height:g}h{first - end}z"
                for first, end, main_kind in merged
                if main_kind is kind
            ]
            if parts:
                self.used.add((kind, 0, 0))
                yield f'<path class="{kind}-0-0" d="{"".join(parts)}"/>'

    def axis(self, bottom: float) -> Iterator[str]:
        """Draw the numbers under the last panel."""
        max_ticks = max(2, min(16, int(self.longest * self.scale / 48)))
        axis = Axis.of(self.longest, self.unit, max_ticks)
        for seconds, text in axis.ticks:
            x = self.left + seconds * self.scale
            yield f'<path class="tick" d="M{x:.2f} {bottom:g}v4"/>'
            yield f'<text class="time" x="{x:.2f}" y="{bottom + 17:g}">{text}</text>'
        yield f'<text class="rank" x="{_MARGIN}" y="{bottom + 17:g}">{escape(axis.unit)}</text>'

    def legend(self, top: float, lighter: str) -> tuple[list[str], float]:
        """Draw the legend; return it and where the drawing ends."""
        kinds = [kind for kind in Kind if any(used[0] is kind for used in self.used)]
        self.used.update((kind, 0, 0) for kind in kinds)
        entries = [(f"{kind}-0-0", WORDS[kind]) for kind in kinds] + [("idle", "idle")]
        if lighter and self.draws_actions:
            entries.append(("", f"lighter: {lighter}"))
        if not self.draws_actions:
            entries.append(("", "each pixel: what the rank does most of that time"))
        elements, x, y = [], float(_MARGIN), top
        for css, words in entries:
            box = 20 if css else 0
            width = box + 6.5 * len(words)
            if x > _MARGIN and x + width > self.width - _MARGIN:
                x, y = float(_MARGIN), y + 20
            if css:
                elements.append(f'<g class="{css}"><rect x="{x:g}" y="{y + 4:g}" width="13" height="13" rx="2"/></g>')
            elements.append(f'<text class="rank" x="{x + box:g}" y="{y + 15:g}">{words}</text>')
            x += width + 16
        return elements, y + _LEGEND + 4


def _bubble(timeline: Timeline) -> str:
    if timeline.serialized:
        return "the ranks took turns in one process"
    return f"bubble {timeline.bubble_rate:.1%}"


def _style(used: set[tuple[Kind, int, int]], background: Background) -> str:
    """Return the rules for the used colors. Plain colors, no variables: SVG editors and converters know these.

    They name the background, since in a page the rules of all its pictures apply to all of them.
    """
    fixed = (
        "@{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
        "@{max-width:100%;height:auto}"
        "@ .title{font-size:13.5px;font-weight:600}"
        "@ .rank,@ .time{font-size:12px}"
        "@ .time,@ g text{text-anchor:middle}"
        "@ g text{pointer-events:none}"
    )
    rules = {
        "light": _rules(LIGHT, used),
        "dark": _rules(DARK, used),
        "auto": f"{_rules(LIGHT, used)}@media (prefers-color-scheme:dark){{{_rules(DARK, used)}}}",
    }
    return (
        (fixed + rules[background]).replace("@ ", f".penstock-{background} ").replace("@{", f".penstock-{background}{{")
    )


def _rules(theme: Theme, used: set[tuple[Kind, int, int]]) -> str:
    rules = [
        f"@ .page{{fill:{theme.page}}}@ .title{{fill:{theme.ink}}}",
        f"@ .rank,@ .time{{fill:{theme.muted}}}@ .tick{{stroke:{theme.muted}}}",
        f"@ .idle,@ .idle rect{{fill:{theme.fills[Kind.WAIT]}}}",
        f"@ .marked{{fill:none;stroke:{theme.accent};stroke-width:3}}",
    ]
    for kind, chunk, parity in sorted(used):
        color, name = shade(theme, kind, chunk, parity), f"@ .{kind}-{chunk}-{parity}"
        rules.append(f"{name}{{fill:{color}}}{name} text{{fill:{ink(theme, kind, chunk)}}}")
    return "".join(rules)

"""`penstock draw`: draws a schedule in the terminal, or prints it as text.

In the terminal each op has a color, lighter on later stages of a rank, but all is readable without colors.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.files import write_text
from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import JSON, check_suffix, output_option, print_json, screen
from penstock.cli._outcome import costs_of_stages, format_all
from penstock.cli._schedule_options import ScheduleOptions
from penstock.costs import Outcome, with_one_model
from penstock.report.colors import LIGHT, ink, shade
from penstock.report.svg import WIDTH, drawing_unit, make_panel
from penstock.report.svg import svg as drawing
from penstock.report.web.screenshot import browser, write_drawing
from penstock.schedule import Op, Schedule, add_communication, grid
from penstock.schedule.describe import WORDS, Kind
from penstock.schedule.grid import slot_timeline
from penstock.schedule.timeline import Timeline
from penstock.simulate.figures import chunks, title

Background = Literal["light", "dark"]
"""Background of a figure."""


def draw(
    requested: ScheduleOptions,
    costs: CostOptions,
    width: int | None = output_option(
        "Characters per line (default: the terminal's); of a file, pixels (default 960)."
    ),
    text: bool = output_option("Print the actions of each rank, as --csv reads them.", "--text", default=False),
    with_messages: bool = output_option("As --text, with messages.", "--with-messages", default=False),
    svg: Path | None = output_option("Draw to a file: for web pages, with names on hover.", metavar="FILE"),
    png: Path | None = output_option("The same for slides and chats; requires chromium.", metavar="FILE"),
    background: Background | None = output_option(
        "Background of a file. Default: an SVG follows the reader's system, a PNG is light."
    ),
    as_json: bool = JSON,
) -> None:
    """Draw a schedule: one line per rank, one color per op.

    Without costs, every F, B, I and W takes one slot. With costs, the figure is a
    timeline: lengths are proportional to time. Several schedules (--schedule
    gpipe,1f1b) share one time axis.
    """
    files = [option for option, file in (("--svg", svg), ("--png", png)) if file is not None]
    if background is not None and not files:
        raise ArgumentError("--background has no effect without --svg or --png; pass one of them")
    if not (text or with_messages or as_json):
        figure = _Figure.of(requested, costs)
        if files:
            figure.write(svg, png, background, WIDTH if width is None else width)
        else:
            figure.print(screen(), width, alone=not requested.is_many)
        return
    if files:
        raise ArgumentError(f"{files[0]}: a file shows the figure; omit --text, --with-messages and --json")
    schedule = requested.one()
    schedule_to_print = add_communication(schedule) if with_messages else schedule
    if as_json:
        print_json(_times(Outcome.simulated(schedule, costs.read(requested.count, requested.ranks)), schedule_to_print))
        return
    if costs != CostOptions() or width is not None:
        raise ArgumentError(
            f"{'--with-messages' if with_messages else '--text'}: the text has no times and no width; omit those "
            "options, or pass --json"
        )
    print(schedule_to_print)


@dataclass(frozen=True)
class _Figure:
    """Schedules to draw; their outcomes, if there are costs; and the reasons for omitting others."""

    schedules: list[Schedule]
    outcomes: list[Outcome] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, requested: ScheduleOptions, costs: CostOptions) -> _Figure:
        is_timed = costs != CostOptions()
        if not requested.is_many:
            schedule = requested.one()
            timed = [Outcome.simulated(schedule, costs.read(requested.count, requested.ranks))] if is_timed else []
            return cls([schedule], timed)
        schedules, refused = requested.all()
        outcomes = dict[Any, Outcome]()
        if is_timed:
            outcomes, refused = with_one_model(costs.read(requested.count, requested.ranks), schedules, refused)
        drawn = [schedules[key] for key in (outcomes or schedules)]
        return cls(drawn, [*outcomes.values()], {name: reason for (name, *_), reason in refused.items()})

    def write(self, svg: Path | None, png: Path | None, background: Background | None, width: int) -> None:
        """Draw to files: to scale if there are outcomes, else in slots."""
        check_suffix("--svg", svg, ".svg")
        check_suffix("--png", png, ".png")
        if png is not None:
            browser(png)  # before anything is written
        if self.outcomes:
            panels = [make_panel(outcome.schedule, outcome.timeline) for outcome in self.outcomes]
            unit = "s" if self.outcomes[0].costs.are_measured else "time"
        else:
            panels, unit = [make_panel(schedule) for schedule in self.schedules], drawing_unit(self.schedules[0])
        picture = drawing(panels, unit, background=background or "auto", width=width)
        if svg is not None:
            write_text(svg, picture, f"--svg {svg}")
            print(f"wrote {svg}")
        if png is not None:
            write_drawing(picture, png)
            print(f"wrote {png}")
        for name, reason in self.omitted.items():
            print(f"omitted: {name} {reason}")

    def print(self, console: Console, width: int | None, *, alone: bool) -> None:
        """Draw in the terminal, several on one axis. `alone`: only one schedule is requested."""
        palette, schedules = Palette.of(console), self.schedules
        width = console.width if width is None else width
        minimum = len(f"rank {schedules[0].ranks - 1}") + 10
        if width < minimum:
            raise ArgumentError(f"--width {width}: pass at least {minimum}")
        in_grid = alone and not self.outcomes
        timelines = [outcome.timeline for outcome in self.outcomes] or [
            slot_timeline(schedule) for schedule in schedules
        ]
        if in_grid:
            pictures = [slots(schedules[0], width, palette)]
        else:
            pictures = on_one_axis(schedules, timelines, width, palette)
        for schedule, timeline, picture in zip(schedules, timelines, pictures, strict=True):
            bubble = "" if in_grid else f"; bubble {timeline.bubble_rate:.1%}"  # slots of a grid are not times
            console.print(Text.assemble((title(schedule), "bold"), bubble))
            console.print(picture, soft_wrap=True, end="\n\n")
        console.print(legend(schedules, palette, fills=not in_grid))
        if self.outcomes:
            console.print(_note(max(self.outcomes, key=lambda outcome: outcome.timeline.makespan_seconds)), style="dim")
        elif not alone:
            console.print("Every action takes one slot; pass costs to compare times.", style="dim")
        for name, reason in self.omitted.items():
            console.print(f"omitted: {name} {reason}", style="dim", markup=False)


def _note(outcome: Outcome) -> str:
    """Describe the costs and the makespan of a timeline."""
    (makespan,), origin = format_all([outcome.timeline.makespan_seconds]), costs_of_stages(outcome)
    lines = [
        f"Assumed: {outcome.costs.assumption}." if outcome.costs.assumed else "",
        f"Costs: {origin}." if origin else "",
        f"Makespan: {makespan}{' s' if outcome.costs.are_measured else ''}; time runs from left to right.",
    ]
    return "\n".join(filter(None, lines))


def _times(outcome: Outcome, schedule: Schedule) -> dict[str, Any]:
    """Return the times of each action, in the costs' unit, and the schedule's text, for JSON."""
    rows = [
        {"actions": [*map(str, track.actions)], "start": [*track.start], "end": [*track.end]}
        for track in outcome.timeline.tracks
    ]
    assumed = {"assumed": dict(outcome.costs.assumed)} if outcome.costs.assumed else {}
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "chunks": chunks(schedule),
        "makespan": outcome.timeline.makespan_seconds,
        "rows": rows,
        "text": str(schedule),
        **assumed,
    }


# -- pictures of text -------------------------------------------------------------------------------------------------


class Palette(Enum):
    """Colors of the terminal. NONE: letters only. FEW: the sixteen colors of every color terminal."""

    NONE = 0
    FEW = 1
    MANY = 2

    @classmethod
    def of(cls, console: Console) -> Palette:
        if console.color_system is None:
            return cls.NONE
        return cls.FEW if console.color_system in ("standard", "windows") else cls.MANY


_FEW_COLORS = {Op.F: "blue", Op.B: "red", Op.I: "yellow", Op.W: "cyan"}
"""The colors closest to those of `penstock.report.colors`."""

_CELL = re.compile(r"([0-9]*)(F|B|I|W)([0-9]+) *")
_IDLE = "."


def slots(schedule: Schedule, width: int, palette: Palette) -> Text:
    """Draw the `grid` in color: every F, B, I and W takes one slot.

    Raises what `grid` raises.
    """
    chunks, picture = _chunks(schedule), Text(grid(schedule, width))
    picture.highlight_regex(r"\.", "dim")
    for cell in _CELL.finditer(picture.plain):
        stage, op, microbatch = cell.groups()
        # A grid omits stage numbers if each rank has one stage.
        chunk = chunks[int(stage)] if stage else 0
        picture.stylize(style(palette, Op(op), chunk, int(microbatch)), *cell.span())
    return picture


def proportional(
    schedule: Schedule, timeline: Timeline, width: int, palette: Palette, longest: float | None = None
) -> Text:
    """Draw the timeline to scale: `width` characters are `longest` seconds, by default the whole timeline.

    A column shows the action that runs in its middle, so an action shorter than a column may not appear. The name of an
    action is at its start, if there is room; its letter fills the rest, or its color if there are colors.
    """
    label = len(f"rank {schedule.ranks - 1}")
    columns = max(1, width - label - 3)
    unit = (timeline.makespan_seconds if longest is None else longest) / columns
    chunks, picture = _chunks(schedule), Text()
    moments = [(column + 0.5) * unit for column in range(columns)]
    moments = [moment for moment in moments if moment < timeline.makespan_seconds]
    for rank, track in enumerate(timeline.tracks):
        picture.append(f"{f'rank {rank}':<{label}} | ")
        for node, run in groupby(_running(track.start, track.end, moment) for moment in moments):
            cell = sum(1 for _ in run)
            if node < 0:
                picture.append(_IDLE * cell, "dim")
                continue
            action = track.actions[node]
            letter = action.op.value
            name = f"{letter}{action.microbatch}" if schedule.stages == schedule.ranks else str(action)
            if palette is Palette.NONE:  # letters separate it from the next name
                text = (name if len(name) < cell else letter).ljust(cell, letter.lower())
            else:
                text = (name if len(name) <= cell else "").ljust(cell)
            picture.append(text, style(palette, action.op, chunks[action.stage], action.microbatch or 0))
        picture.append("" if rank == schedule.ranks - 1 else "\n")
    return picture


def on_one_axis(
    schedules: Sequence[Schedule], timelines: Sequence[Timeline], width: int, palette: Palette
) -> list[Text]:
    """Draw timelines with columns of equal duration. Slots are whole columns if possible."""
    longest = max(timeline.makespan_seconds for timeline in timelines)
    columns = width - len(f"rank {schedules[0].ranks - 1}") - 3
    if longest == round(longest) <= columns:
        width -= columns % round(longest)
    pairs = zip(schedules, timelines, strict=True)
    return [proportional(schedule, timeline, width, palette, longest) for schedule, timeline in pairs]


def legend(schedules: Sequence[Schedule], palette: Palette, *, fills: bool = False) -> Text:
    """Return the legend of letters and colors. `fills`: the drawing is to scale."""
    codes = {code for schedule in schedules for row in schedule.rows for code in row.op}
    text = Text()
    for op in (op for op in _FEW_COLORS if op.code in codes):
        text.append(f" {op.value} ", style(palette, op, 0, 0)).append(f" {WORDS[Kind.of(op)]}  ")
    text.append(f"{_IDLE} idle")
    if fills and palette is Palette.NONE:
        text.append("; small letters: the action continues")
    with_chunks = [schedule for schedule in schedules if schedule.stages > schedule.ranks]
    if with_chunks and palette is not Palette.NONE:
        lighter = dict.fromkeys("later chunks" if s.placement.pipelines == 1 else "the copy" for s in with_chunks)
        text.append(f"; lighter: {' or '.join(lighter)}")
    return text


def style(palette: Palette, op: Op, chunk: int, microbatch: int) -> Style:
    """Return the colors of a cell."""
    if palette is Palette.NONE:
        return Style.null()
    if palette is Palette.FEW:
        return Style(color="black", bgcolor=f"{'bright_' if chunk else ''}{_FEW_COLORS[op]}")
    kind = Kind.of(op)
    return Style(color=ink(LIGHT, kind, chunk), bgcolor=shade(LIGHT, kind, chunk, microbatch))


def _chunks(schedule: Schedule) -> dict[int, int]:
    """Return the index of each stage among those of its rank, from 0."""
    return {stage: index for stages in schedule.placement.by_rank for index, stage in enumerate(stages)}


def _running(start: array[float], end: array[float], moment: float) -> int:
    """Return the index of the action that runs at a moment; -1 if idle."""
    node = bisect_right(start, moment) - 1
    while node >= 0 and end[node] <= start[node]:
        node -= 1  # an action that takes no time starts with the one that follows it
    return node if node >= 0 and moment < end[node] else -1

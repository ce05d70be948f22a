"""Schedules and timelines in a terminal. Each op has a color, lighter on later stages of a rank, but all is readable
without colors."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import groupby

from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock.report.colors import LIGHT, ink, shade
from penstock.schedule import Op, Schedule, grid
from penstock.schedule.describe import WORDS, Kind
from penstock.schedule.timeline import Timeline


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

"""The parts of a picture of a timeline, whatever draws it: a mark for each action, or merged columns if there are too
many."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from penstock.schedule.action import OPS
from penstock.schedule.describe import Kind, describe
from penstock.schedule.timeline import Timeline, Track

MAX_MARKS = 6000
"""Beyond this number each action is a pixel wide or less: pictures show each pixel's main kind of action."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An action of a rank, in seconds of its timeline.

    Attributes:
        chunk: the stage's index among its rank's stages.
        label: what fits into it: the microbatch.
        description: what it is, in words.
    """

    start: float
    end: float
    kind: Kind
    chunk: int
    microbatch: int
    label: str
    description: str


def marks(timeline: Timeline, rank: int) -> Iterator[Mark]:
    """Yield the actions of a rank that take time, in order."""
    track = timeline.tracks[rank]
    chunk = chunks(track)
    for action, start, end in zip(track.actions, track.start, track.end, strict=True):
        if end > start:
            number = -1 if action.microbatch is None else action.microbatch
            label = "" if number < 0 else str(number)
            yield Mark(start, end, Kind.of(action.op), chunk[action.stage], max(0, number), label, describe(action))


def chunks(track: Track) -> dict[int, int]:
    """Return each stage's index among its rank's stages, from 0."""
    stages = {stage for stage, _ in track.actions.kinds}
    return {stage: index for index, stage in enumerate(sorted(stages))}


def has_chunks(timeline: Timeline) -> bool:
    """Whether a rank has several stages."""
    return any(len(chunks(track)) > 1 for track in timeline.tracks)


def longest_label(timeline: Timeline) -> int:
    """Return the length of the longest label. With room for it, actions of one length are labeled alike or not at
    all."""
    last = max((max(track.actions.microbatch, default=0) for track in timeline.tracks), default=0)
    return len(str(max(0, last)))


def merge_columns(track: Track, unit: float, columns: int) -> list[tuple[int, int, Kind]]:
    """Divide the rank's time into columns of `unit` seconds; merge neighbors with the same main kind, as (first, end,
    kind).

    Columns in which it mostly does nothing are left out.
    """
    main_kinds: list[Kind | None] = [None] * columns
    share: defaultdict[Kind, float] = defaultdict(float)
    column = 0
    kinds = [Kind.of(op) for op in OPS]

    def close() -> None:
        if share:
            kind = max(share, key=share.__getitem__)
            if share[kind] >= 1 - sum(share.values()):
                main_kinds[column] = kind
            share.clear()

    for code, start, end in sorted(zip(track.actions.op, track.start, track.end, strict=True), key=itemgetter(1)):
        position, end_position = start / unit, end / unit
        while position < end_position:
            column_here = min(int(position), columns - 1)
            if column_here != column:
                close()
                column = column_here
            stop = min(end_position, column_here + 1) if column_here < columns - 1 else end_position
            share[kinds[code]] += stop - position
            position = stop
    close()
    merged = []
    for kind, group in groupby(range(columns), key=main_kinds.__getitem__):
        if kind is not None:
            indices = [*group]
            merged.append((indices[0], indices[-1] + 1, kind))
    return merged


@dataclass(frozen=True, slots=True)
class Axis:
    """A time axis: the numbers on it, and their unit.

    Attributes:
        ticks: positions in seconds, ascending, each with its text.
        unit: what the numbers count.
        scale: how many seconds one of them is.
    """

    ticks: tuple[tuple[float, str], ...]
    unit: str
    scale: float = 1.0

    def text(self, seconds: float) -> str:
        """Format a time in the axis' unit; slots and costs are only numbers."""
        number = f"{seconds / self.scale:.5g}"
        return f"{number} {self.unit}" if self.unit in ("s", "ms", "us") else number

    @classmethod
    def of(cls, seconds: float, unit: str = "s", max_ticks: int = 12) -> Axis:
        """Build an axis from 0 to `seconds` with at most this many ticks. Short times are in ms or us."""
        scale, unit = scaled(seconds) if unit == "s" else (1.0, unit)
        span = seconds / scale
        if not span > 0:
            return cls(((0.0, "0"),), unit, scale)
        power = 10.0 ** math.floor(math.log10(span / max_ticks))
        step = next(step for factor in (1, 2, 5, 10) if span / (step := factor * power) <= max_ticks)
        if unit == "slots":
            step = max(1.0, step)
        count = math.floor(span / step + 1e-9)
        return cls(tuple((k * step * scale, f"{k * step:.6g}") for k in range(count + 1)), unit, scale)


def scaled(seconds: float) -> tuple[float, str]:
    """Return the largest unit in which a time is at least 1: its length in seconds, and its name."""
    return next(((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= scale), (1e-6, "us"))

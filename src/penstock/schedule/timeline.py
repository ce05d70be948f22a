"""When each action ran: the result of simulated and real runs alike.

A timeline consists of columns, one track per rank, so that millions of spans stay small; `Span`s are views on them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import sub
from typing import Any

from penstock._base.aliases import accept_aliases, accept_old_names
from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT, validate
from penstock._base.formatting import pluralize
from penstock.schedule.action import Action, Op
from penstock.schedule.display import Displayable
from penstock.schedule.placement import MAX_RANKS
from penstock.schedule.row import Row

Times = Sequence[int]
"""When an action began to wait, was ready, and ended, in nanoseconds."""

_COMPUTE_CODES = frozenset(op.code for op in Op if op.is_compute)


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank: it waited, then ran from start to end, on the timeline's clock."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float
    waited_seconds: float = 0.0
    """How long the rank was blocked right before the start, waiting for messages."""


@dataclass(frozen=True, slots=True)
class Track:
    """The spans of one rank as columns, in order: `start`, `end` and `waited` in seconds, one entry per action."""

    actions: Row
    start: array[float]
    end: array[float]
    waited: array[float]

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class _TrackFile:
    __pydantic_config__ = STRICT
    actions: tuple[str, ...]
    start_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    waited_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _TimelineFile:
    __pydantic_config__ = STRICT
    ranks: tuple[_TrackFile, ...]
    in_turns: bool = False
    stages: int = 0
    crowded: bool = False


@accept_old_names(in_turns="serialized")
@dataclass(frozen=True, repr=False)
class Timeline(Displayable):
    """The spans of all ranks on one clock, which starts at 0 when the first rank begins to wait or run.

    Iterating yields `Span`s, rank by rank.

    Attributes:
        serialized: one process ran all ranks, one action at a time. Durations are real; start times say nothing about
            ranks with a device each, so there is no bubble to measure.
        crowded: ranks had fewer cores than they compute with, and so slowed each other down.
    """

    tracks: tuple[Track, ...]
    serialized: bool = False
    crowded: bool = False

    @classmethod
    @accept_aliases(in_turns="serialized")
    def from_rows(
        cls, rows: Sequence[Row], times: Sequence[Sequence[Times]], *, serialized: bool = False, crowded: bool = False
    ) -> Timeline:
        """Build one from the actions of each rank, and their (begin, ready, end) in nanoseconds on one clock.

        From begin to ready the rank waited, from ready to end it ran. The earliest begin becomes 0. `serialized`,
        `crowded`: as in the attributes.

        Raises:
            ArgumentError: begin, ready and end are not in this order.
        """
        zero = min((rank_times[0][0] for rank_times in times if rank_times), default=0)
        columns = (
            (
                [(ready - zero) / 1e9 for _, ready, _ in rank_times],
                [(end - zero) / 1e9 for _, _, end in rank_times],
                [(ready - begin) / 1e9 for begin, ready, _ in rank_times],
            )
            for rank_times in times
        )
        timeline = cls.from_columns(rows, columns)
        return replace(timeline, serialized=serialized and len(rows) > 1, crowded=crowded)

    @classmethod
    def from_columns(cls, rows: Sequence[Row], times: Iterable[Sequence[Sequence[float]]]) -> Timeline:
        """Build one from the actions of each rank, and for each rank when they started, ended, and how long the rank
        waited before them, in seconds.

        Raises:
            ArgumentError: one ends before it starts, or waited less than nothing.
        """
        return cls(tuple(_track(row, *rank_times) for row, rank_times in zip(rows, times, strict=True)))

    of_rows, of_columns = from_rows, from_columns  # until 0.2

    @classmethod
    def from_dict(cls, data: Any, what: str = "the timeline") -> Timeline:
        """Read what `to_dict` wrote. Raise ArgumentError if it is not a timeline, or a rank's part is missing.

        Args:
            what: names the file in messages.
        """
        if isinstance(data, dict) and isinstance(data.get("ranks"), list) and len(data["ranks"]) > MAX_RANKS:
            raise ArgumentError(f"{what} has {len(data['ranks']):,} ranks; expected at most {MAX_RANKS:,}")
        parsed = validate(_TimelineFile, data, what)
        try:
            tracks = [
                _track(Row([Action.parse(text) for text in track.actions]), *columns)
                for track in parsed.ranks
                for columns in [(track.start_seconds, track.end_seconds, track.waited_seconds)]
            ]
            for track in tracks:
                if max((0, *track.actions.stage, *track.actions.microbatch)) > _MAX_NUMBER:
                    check_index_range(track.actions)
        except ValueError as error:  # ArgumentError and ScheduleError included
            raise ArgumentError(f"{what} is no timeline, as `Timeline.to_dict` writes it: {error}") from None
        timeline = cls(tuple(tracks), parsed.in_turns, parsed.crowded)
        if timeline.stages < parsed.stages:
            raise ArgumentError(
                f"{what} has {timeline.stages} of {parsed.stages} stages: no rank has stage {parsed.stages - 1}; pass "
                "the timeline of every rank"
            )
        return timeline

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and text, for JSON."""
        return {
            "in_turns": self.serialized,
            "crowded": self.crowded,
            "stages": self.stages,
            "ranks": [
                {
                    "actions": [str(action) for action in track.actions],
                    "start_seconds": list(track.start),
                    "end_seconds": list(track.end),
                    "waited_seconds": list(track.waited),
                }
                for track in self.tracks
            ],
        }

    @property
    def ranks(self) -> int:
        return len(self.tracks)

    @cached_property
    def stages(self) -> int:
        """How many stages there are, by the highest that an action names."""
        return 1 + max((stage for track in self.tracks for stage, _ in track.actions.kinds), default=-1)

    def __len__(self) -> int:
        """Return the number of spans."""
        return sum(map(len, self.tracks))

    def __iter__(self) -> Iterator[Span]:
        for rank in range(self.ranks):
            yield from self.spans(rank)

    def spans(self, rank: int) -> Iterator[Span]:
        """Yield the spans of one rank, in order."""
        track = self.tracks[rank]
        for action, start, end, waited in zip(track.actions, track.start, track.end, track.waited, strict=True):
            yield Span(rank, action, start, end, waited)

    @cached_property
    def makespan_seconds(self) -> float:
        """The end of the last span, counted from 0."""
        return max((end for end in self._last_ends if end is not None), default=0.0)

    @cached_property
    def span_seconds(self) -> float:
        """The maximum over ranks of the rank's last end minus the start of its first F.

        The figure that zero-bubble papers report: it leaves out how late a rank starts.
        """
        spans = []
        for track, last in zip(self.tracks, self._last_ends, strict=True):
            first = next((i for i, code in enumerate(track.actions.op) if code == Op.F.code), None)
            if first is not None and last is not None:
                spans.append(last - track.start[first])
        return max(spans, default=0.0)

    def busy_seconds(self, rank: int) -> float:
        """Return the seconds that a rank computed: F, B, I and W, without waits."""
        return self._busy[rank]

    def waited_seconds(self, rank: int) -> float:
        """Return the seconds that a rank waited for messages before its actions."""
        return sum(self.tracks[rank].waited)

    @cached_property
    def bubble_rate(self) -> float:
        """The share of `span_seconds` in which ranks do not compute, averaged over ranks; 0 if nothing ran, NaN if
        ranks took turns in one process.
        """
        if self.serialized:
            return math.nan
        available = self.ranks * self.span_seconds
        return 1 - sum(self._busy) / available if available else 0.0

    @cached_property
    def _last_ends(self) -> list[float | None]:
        """When each rank's last span ends; None if it has none."""
        return [max(track.end, default=None) for track in self.tracks]

    @cached_property
    def _busy(self) -> list[float]:
        """`busy_seconds` of each rank."""
        return list(map(_busy_seconds, self.tracks))

    def __repr__(self) -> str:
        size = f"{pluralize(self.ranks, 'rank')}, {pluralize(len(self), 'span')}"
        turns = ", ranks took turns in one process" if self.serialized else ""
        return f"Timeline({size}, makespan {self.makespan_seconds:g} s{turns})"


def _busy_seconds(track: Track) -> float:
    durations: Iterable[float] = map(sub, track.end, track.start)
    if any(code not in _COMPUTE_CODES for _, code in track.actions.kinds):
        durations = compress(durations, map(_COMPUTE_CODES.__contains__, track.actions.op))
    return sum(durations)


def check_index_range(actions: Iterable[Action]) -> None:
    """Raise ArgumentError if a stage or microbatch is numbered so high that a file must be damaged: tables of all
    stages and microbatches would fill the memory."""
    for action in actions:
        if max(action.stage, action.microbatch or 0) > _MAX_NUMBER:
            raise ArgumentError(f"{action}: stages and microbatches are expected to be numbered from 0")


_MAX_NUMBER = 1_000_000


def _track(row: Row, start: Sequence[float], end: Sequence[float], waited: Sequence[float]) -> Track:
    """Build a track whose columns have been checked, without making its actions."""
    for index, started, ended, blocked in zip(range(len(row)), start, end, waited, strict=True):
        if not (-math.inf < started <= ended < math.inf and 0 <= blocked < math.inf):
            raise ArgumentError(
                f"{row[index]} waited {blocked} s, started at {started} s and ended at {ended} s; expected this order, "
                "and finite numbers"
            )
    return Track(row, array("d", start), array("d", end), array("d", waited))

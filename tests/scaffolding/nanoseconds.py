"""Timelines from the times of single actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.schedule import Action, Row
from penstock.schedule.timeline import Span, Timeline


def from_nanoseconds(rows: Sequence[Sequence[tuple[Action, int, int, int]]], *, in_turns: bool = False) -> Timeline:
    """Each rank's (action, begin, ready, end), in order."""
    actions = [Row([action for action, *_ in row]) for row in rows]
    return Timeline.from_rows(actions, [[times for _, *times in row] for row in rows], serialized=in_turns)


def merged(rows: Iterable[Iterable[Span]], *, in_turns: bool = False) -> Timeline:
    """A timeline of the spans of each rank, in order, on one clock."""
    ranks = [list(row) for row in rows]
    columns = [
        ([s.start_seconds for s in spans], [s.end_seconds for s in spans], [s.waited_seconds for s in spans])
        for spans in ranks
    ]
    made = Timeline.from_columns([Row([s.action for s in spans]) for spans in ranks], columns)
    return replace(made, serialized=in_turns)

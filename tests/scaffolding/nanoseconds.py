"""Timelines from the times of single actions."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule import Action, Row
from penstock.schedule.timeline import Timeline


def from_nanoseconds(rows: Sequence[Sequence[tuple[Action, int, int, int]]], *, in_turns: bool = False) -> Timeline:
    """Each rank's (action, begin, ready, end), in order."""
    actions = [Row([action for action, *_ in row]) for row in rows]
    return Timeline.of_rows(actions, [[times for _, *times in row] for row in rows], in_turns=in_turns)

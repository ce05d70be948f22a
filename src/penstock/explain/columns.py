"""Columns of events, a row each, in microseconds on one clock -> a `Recording`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import ArgumentError, ScheduleError
from penstock.explain.event import Event, Recording
from penstock.explain.names import op_named
from penstock.files import MAX_QUOTED, check_number_of_values, quoted
from penstock.schedule import Action, Op
from penstock.words import line_of

_NEEDED = ("op", "microbatch", "start_us", "duration_us")


def read_columns(text: str, file: str) -> Recording:
    """The events of a CSV, whose columns are divided by commas, semicolons or tabs.

    Args:
        text: what it says.
        file: what messages call it.

    Raises:
        ArgumentError: a column is missing, or a row is no event.
    """
    check_number_of_values(text, file)
    head = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
    if missing := [name for name in _NEEDED if name not in (reader.fieldnames or ())]:
        raise ArgumentError(f"{file}: has no column {', '.join(missing)}; expected {', '.join(_NEEDED)}")
    events = []
    for line, row in enumerate(reader, 2):
        try:
            events.append(_row(row))
        except (ValueError, TypeError, ScheduleError) as error:
            reason = line_of(str(error), MAX_QUOTED)
            raise ArgumentError(f"{file}, line {line}: {quoted(dict(row))} is not an event: {reason}") from None
    sent = (one.action.stage for one in events if one.action is not None and one.action.op is Op.SEND_F)
    stages = max((2 + stage for stage in sent), default=0)
    return Recording(tuple(sorted(events, key=lambda event: event.start_seconds)), stages=stages)


def _row(row: Mapping[str, Any]) -> Event:
    rank, replica = int(row.get("pp_rank") or 0), int(row.get("dp_rank") or 0)
    stage = int(row["stage"]) if row.get("stage") else rank
    start, seconds = float(row["start_us"]) / 1e6, float(row["duration_us"]) / 1e6
    if not (math.isfinite(start) and 0 <= seconds < math.inf):
        raise ValueError("its start or duration is no time")
    op = op_named(row["op"])
    action = None if op is None else Action(stage, op, int(row["microbatch"]))
    step = int(row["step"]) if row.get("step") else None
    return Event((replica, rank), row["op"], start, start + seconds, action, step, rank, replica)

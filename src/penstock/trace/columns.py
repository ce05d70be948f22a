"""Columns of events, a row each, on one clock: CSV, or JSON's lists -> a `TraceData`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import zip_longest
from typing import Any

from penstock._base.errors import ArgumentError, ScheduleError
from penstock._base.files import MAX_QUOTED, parse_csv, quoted
from penstock._base.formatting import printable_line
from penstock.schedule import Action, Op
from penstock.trace.event import Event, TraceData
from penstock.trace.names import extract_numbers, field_for, read_name

_OP = ("op", "name", "type", "event", "action")
_TIME = re.compile(
    r"(?:(?P<start>start|begin|ts)|(?P<end>end|finish|completion)|(?P<duration>duration|dur))(?:s|_times?)?"
    r"(?:_(?P<unit>ns|us|ms|s))?"
)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}


def read_columns(text: str, file: str, pattern: re.Pattern[str] | None = None) -> TraceData:
    """Read the events of a CSV, whose columns are divided by commas, semicolons or tabs.

    Args:
        text: its contents.
        file: its name, for messages.
        pattern: the user's pattern of names, in addition to the table's.

    Raises:
        ArgumentError: a column is missing, or a row is not an event.
    """
    table = parse_csv(text, file, max(",;\t", key=text.partition("\n")[0].count))
    head = next(table, [])
    return read_rows((dict(zip_longest(head, row)) for row in table if row), file, pattern, ("line", 2))


def read_lists(data: Any, file: str, pattern: re.Pattern[str] | None = None) -> TraceData | None:
    """Read the events of JSON: a list of rows, one of them for each rank, or a list for each column; None if it is
    none."""
    if isinstance(data, dict) and data and all(isinstance(item, list) for item in data.values()):
        if all(key.isdecimal() and len(key) < 19 for key in data):
            data = [data[key] for key in sorted(data, key=int)]
        elif len({len(item) for item in data.values()}) == 1:
            data = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    if not isinstance(data, list):
        return None
    if all(isinstance(item, list) for item in data):
        data = [{"rank": rank, **row} for rank, item in enumerate(data) for row in item if isinstance(row, dict)]
    return read_rows(data, file, pattern)


def read_rows(
    rows: Iterable[Any], file: str, pattern: re.Pattern[str] | None = None, first: tuple[str, int] = ("row", 1)
) -> TraceData:
    """Read the events of rows, by the names of their columns. `first`: what messages call the first row.

    Raises:
        ArgumentError: a column is missing, or a row is not an event.
    """
    events: list[Event] = []
    unit, start = first
    for number, row in enumerate(rows, start):
        if number == start:
            _check_columns(row, file)
        try:
            events.append(_parse_row(row, pattern))
        except (AttributeError, KeyError, StopIteration, ValueError, TypeError, OverflowError, ScheduleError) as error:
            reason = printable_line(str(error), MAX_QUOTED)
            raise ArgumentError(f"{file}, {unit} {number}: {quoted(row)} is not an event: {reason}") from None
    sent = (event.action.stage for event in events if event.action is not None and event.action.op is Op.SEND_F)
    stages = max((2 + stage for stage in sent), default=0)
    return TraceData(tuple(sorted(events, key=lambda event: event.start_seconds)), stages=stages)


def has_times(text: str) -> bool:
    """Return whether the first line of a CSV names a column of times, as tables of events do and schedules do not."""
    return any(_parse_time(column.strip(' "')) for column in re.split(r"[,;\t]", text.partition("\n")[0].strip()))


def _check_columns(row: Any, file: str) -> None:
    """Raise ArgumentError if a column is missing."""
    row = row if isinstance(row, dict) else {}
    times = [time[0] for column in row if (time := _parse_time(str(column)))]
    present = {"op": any(column in row for column in _OP), "start_us": "start" in times, "duration_us": len(times) > 1}
    if missing := [column for column, is_present in present.items() if not is_present]:
        raise ArgumentError(
            f"{file}: has no column {', '.join(missing)}; expected op, microbatch, start_us, and duration_us or end_us"
        )


@cache
def _parse_time(column: str) -> tuple[str, float] | None:
    """Return which time a column is, and how many seconds its unit has: one, unless it is named or Chrome's."""
    if (match := _TIME.fullmatch(column)) is None:
        return None
    kind = next(kind for kind in ("start", "end", "duration") if match[kind])
    return kind, _SECONDS.get(match["unit"] or {"ts": "us", "dur": "us"}.get(column, "s"), 1.0)


def _parse_row(row: Mapping[str, Any], pattern: re.Pattern[str] | None) -> Event:
    op = str(next(row[column] for column in _OP if row.get(column)))
    parsed = read_name(op, row, pattern)
    numbers = extract_numbers(row) if parsed is None else parsed.numbers
    if invalid := [c for c in row if row[c] not in (None, "") and field_for(c) not in (None, "microbatch", *numbers)]:
        raise ValueError(f"its {invalid[0]} is no number")
    times = {time[0]: float(row[column]) * time[1] for column in row if (time := _parse_time(str(column)))}
    start = times["start"]
    seconds = times["duration"] if "duration" in times else times["end"] - start
    if not (math.isfinite(start) and 0 <= seconds < math.inf):
        raise ValueError("its start or duration is no time")
    rank, replica = numbers.get("rank", numbers.get("stage", 0)), numbers.get("replica", 0)
    action, chunk = None, None
    if parsed is not None:
        action = Action(numbers.get("stage", rank), parsed.op, numbers.get("microbatch"))
        chunk = None if "stage" in numbers else numbers.get("chunk")
    return Event((replica, rank), op, start, start + seconds, action, numbers.get("step"), rank, replica, chunk)

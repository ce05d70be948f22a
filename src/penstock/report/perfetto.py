"""A timeline as a trace for https://ui.perfetto.dev and chrome://tracing, in Chrome's trace event format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from penstock.schedule.timeline import Span, Timeline

_MICROSECONDS = 1e6


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """The trace, ready for JSON: a process for each rank, with a thread for compute and one for communication.

    A slice is named after its op and microbatch (`F0`), a wait `wait`. Times are in microseconds, as the format
    requires. Messages that travel at the same time, as a GPU's do, get more threads: slices of one cannot overlap.
    """
    events: list[dict[str, Any]] = []
    turns = " (in turns with the others, in one process)" if timeline.in_turns else ""
    for rank in range(timeline.ranks):
        events.append(_metadata("process_name", rank, 0, name=f"rank {rank}{turns}"))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        free = [-math.inf]  # when each thread for communication is free again
        slices = []
        for span in timeline.spans(rank):
            slices += _slices(span, 0 if span.action.op.is_compute else _thread(free, span))
        names = ["compute", "communication", *(f"communication {more}" for more in range(2, len(free) + 1))]
        events += [_metadata("thread_name", rank, thread, name=name) for thread, name in enumerate(names)]
        events += slices
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace from `to_perfetto` as JSON."""
    Path(path).write_text(json.dumps(to_perfetto(timeline)), encoding="utf-8")


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _thread(free: list[float], span: Span) -> int:
    """The first thread for communication that is free when the span begins, a new one if none is."""
    began = span.start_seconds - span.waited_seconds
    place = next((place for place, until in enumerate(free) if until <= began), len(free))
    free[place : place + 1] = [span.end_seconds]
    return 1 + place


def _slices(span: Span, thread: int) -> list[dict[str, Any]]:
    """The slice of an action, after that of its wait if it had one."""
    action = span.action
    microbatch = "" if action.microbatch is None else action.microbatch
    place = {"ph": "X", "pid": span.rank, "tid": thread}
    ran = {
        **place,
        "name": f"{action.op.value}{microbatch}",
        "cat": action.op.value,
        "ts": span.start_seconds * _MICROSECONDS,
        "dur": (span.end_seconds - span.start_seconds) * _MICROSECONDS,
        "args": {"action": str(action), "stage": action.stage, "microbatch": action.microbatch},
    }
    if not span.waited_seconds:
        return [ran]
    wait = {
        **place,
        "name": "wait",
        "cat": "wait",
        "ts": (span.start_seconds - span.waited_seconds) * _MICROSECONDS,
        "dur": span.waited_seconds * _MICROSECONDS,
        "args": {"for": str(action)},
    }
    return [wait, ran]

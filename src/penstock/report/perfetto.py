"""A timeline as a trace for https://ui.perfetto.dev and chrome://tracing, in Chrome's trace event format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.schedule.timeline import Span, Timeline

_THREADS = ("compute", "communication")
_MICROSECONDS = 1e6


def to_perfetto(timeline: Timeline) -> dict[str, Any]:
    """The trace, ready for JSON: a process for each rank, with a thread for compute and one for communication.

    A slice is named after its op and microbatch (`F0`), a wait `wait`. Times are in microseconds, as the format
    requires.
    """
    events: list[dict[str, Any]] = []
    turns = " (in turns with the others, in one process)" if timeline.in_turns else ""
    for rank in range(timeline.ranks):
        events.append(_metadata("process_name", rank, 0, name=f"rank {rank}{turns}"))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        events += [_metadata("thread_name", rank, thread, name=name) for thread, name in enumerate(_THREADS)]
        for span in timeline.spans(rank):
            events += _slices(span)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Writes the trace from `to_perfetto` as JSON."""
    Path(path).write_text(json.dumps(to_perfetto(timeline)), encoding="utf-8")


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _slices(span: Span) -> list[dict[str, Any]]:
    """The slice of an action, after that of its wait if it had one."""
    action = span.action
    microbatch = "" if action.microbatch is None else action.microbatch
    place = {"ph": "X", "pid": span.rank, "tid": 0 if action.op.is_compute else 1}
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

"""A timeline as a trace for https://ui.perfetto.dev and chrome://tracing, in Chrome's trace event format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock._base.files import write_text
from penstock.report.marks import chunks
from penstock.schedule.action import OPS, Op
from penstock.schedule.describe import describe
from penstock.schedule.timeline import Span, Timeline, Track
from penstock.trace.names import STAGES_METADATA

_MICROSECONDS = 1e6

Curve = Mapping[str, Sequence[tuple[float, float]]]
"""A rank's memory by kind, such as activations: at which second it changes, ascending, and to what."""


def to_perfetto(timeline: Timeline, *, memory: Sequence[Curve | None] = (), unit: str = "bytes") -> dict[str, Any]:
    """Build the trace, ready for JSON: a process for each rank, with a thread for compute and one for communication.

    A slice is an action in words, with its text (`1F3`) among its arguments, a wait `wait`. An arrow leads from what
    made a message to what used it. Counters show memory, or how many microbatches a rank holds (of several
    stages: activations). Times are in microseconds, as the format requires. Messages that travel at the same time, as
    a GPU's do, get more threads: slices of one cannot overlap.

    Args:
        timeline: simulated or real.
        memory: a curve for each rank; None, or none at all: the microbatches that are held.
        unit: of the curves' sizes.
    """
    events: list[dict[str, Any]] = []
    turns = " (in turns with the others, in one process)" if timeline.serialized else ""
    for rank, track in enumerate(timeline.tracks):
        events.append(_metadata("process_name", rank, 0, name=f"rank {rank}{turns}"))
        stage_info = {"stages": timeline.stages, "in_turns": timeline.serialized, "crowded": timeline.crowded}
        stages = f"stage{'s' * (len(chunks(track)) != 1)} {', '.join(map(str, chunks(track)))}"
        events.append(_metadata(STAGES_METADATA, rank, 0, labels=stages, **stage_info))
        events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
        free = [-math.inf]  # when each thread for communication is free again
        slices = []
        for span in timeline.spans(rank):
            thread, began = 0, span.start_seconds - span.waited_seconds
            if not span.action.op.is_compute:  # the first thread for communication that is free then, or a new one
                index = next((index for index, until in enumerate(free) if until <= began), len(free))
                free[index : index + 1] = [span.end_seconds]
                thread = 1 + index
            slices += _slices(span, thread)
        names = ["compute", "communication", *(f"communication {number}" for number in range(2, len(free) + 1))]
        events += [_metadata("thread_name", rank, thread, name=name) for thread, name in enumerate(names)]
        events += slices
        curve = memory[rank] if rank < len(memory) else None
        if curve is None:
            noun = "microbatches" if len(chunks(track)) == 1 else "activations"  # of a stage
            events += _counters(rank, {f"{noun} held": _microbatches_held(track)}, "")
        else:
            events += _counters(rank, curve, unit)
    if not timeline.serialized:
        events += _arrows(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(
    timeline: Timeline, path: str | Path, *, memory: Sequence[Curve | None] = (), unit: str = "bytes"
) -> None:
    """Write the trace from `to_perfetto` as JSON."""
    write_text(path, json.dumps(to_perfetto(timeline, memory=memory, unit=unit)))


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _slices(span: Span, thread: int) -> list[dict[str, Any]]:
    """Return the slice of an action, after that of its wait if it had one."""
    action, common = span.action, {"ph": "X", "pid": span.rank, "tid": thread}
    wait_slice = {
        **common,
        "name": "wait",
        "cat": "wait",
        "ts": (span.start_seconds - span.waited_seconds) * _MICROSECONDS,
        "dur": span.waited_seconds * _MICROSECONDS,
        "args": {"for": str(action)},
    }
    action_slice = {
        **common,
        "name": describe(action),
        "cat": action.op.value,
        "ts": span.start_seconds * _MICROSECONDS,
        "dur": (span.end_seconds - span.start_seconds) * _MICROSECONDS,
        "args": {"action": str(action), "stage": action.stage, "microbatch": action.microbatch},
    }
    return [wait_slice, action_slice] if span.waited_seconds else [action_slice]


def _counters(rank: int, curve: Curve, unit: str) -> Iterator[dict[str, Any]]:
    for name, points in curve.items():
        label = f"{name} ({unit})" if unit else name
        for second, size in points:
            yield {"ph": "C", "name": label, "pid": rank, "ts": second * _MICROSECONDS, "args": {name: size}}


def _microbatches_held(track: Track) -> list[tuple[float, float]]:
    """Return how many microbatches, or parts of them, have begun their forward and not ended their backward."""
    stages_with_backward = {stage for stage, code in track.actions.kinds if OPS[code].is_backward}
    changes: list[tuple[float, float]] = []
    columns = (track.actions.stage, track.actions.op, track.start, track.end)
    for stage, code, start, end in zip(*columns, strict=True):
        if code == Op.F.code:
            changes.append((start, 1.0))
        if code in (Op.B.code, Op.W.code) or (code == Op.F.code and stage not in stages_with_backward):
            changes.append((end, -1.0))
    held, points = 0.0, [(0.0, 0.0)]
    for second, change in sorted(changes):
        held += change
        if points[-1][0] == second:
            points.pop()
        points.append((second, held))
    return points


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield, for each message between ranks, a flow between the compute slices at its two ends, each bound by a moment
    within it.

    If the timeline has sends, these define the messages; otherwise each stage passes on to the next, and back. Actions
    that have not run, or took no time, have no message.
    """
    spans = {(span.action.stage, span.action.op, span.action.microbatch): span for span in timeline}
    sends = (span.action for span in timeline if span.action.op.is_send)
    messages = [(send.stage, send.peer, send.microbatch, send.op is Op.SEND_F) for send in sends] or [
        (stage, stage + 1 if op is Op.F else stage - 1, microbatch, op is Op.F)
        for stage, op, microbatch in spans
        if op is Op.F or (op in (Op.B, Op.I) and stage)
    ]
    number = 0
    for source, target, microbatch, forward in messages:
        ops = (Op.F,) if forward else (Op.B, Op.I)
        keys = ([(stage, op, microbatch) for op in ops] for stage in (source, target) if stage is not None)
        producer, consumer = (next((spans[key] for key in candidates if key in spans), None) for candidates in keys)
        if producer is None or consumer is None or producer.rank == consumer.rank:
            continue
        if producer.end_seconds > producer.start_seconds and consumer.end_seconds > consumer.start_seconds:
            name = "activations" if forward else "gradients"
            shared = {"name": name, "cat": "message", "id": number, "tid": 0}
            begin, end = (
                {**shared, "pid": span.rank, "ts": (span.start_seconds + span.end_seconds) / 2 * _MICROSECONDS}
                for span in (producer, consumer)
            )
            yield from ({"ph": "s", **begin}, {"ph": "f", "bp": "e", **end})
            number += 1

"""Traces in Chrome's format: our own, torch's profiler's (Kineto), and others whose events name the actions."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from re import Pattern
from typing import Any

from penstock._base.errors import ArgumentError, is_number
from penstock._base.files import quoted
from penstock.schedule import Action, Op
from penstock.trace.event import Event, TraceData
from penstock.trace.names import STAGES_METADATA, ParsedName, read_name

_STEP = re.compile(r"(?:ProfilerStep#|iter_[0-9]+_)([0-9]{1,18})")
"""Marks of torch's profiler, and of sail-sg's zero bubble, behind the rank."""
_MAX_OPEN = 50
"""Events of a thread that have begun and not ended, among which the one that ends is looked for: the last."""
_ON_DEVICE = "gpu_user_annotation"
"""Kineto's category of a range as the device saw it; the host only gave it work."""
_SKIPPED = re.compile(rf"^{_STEP.pattern}$|\bwaits?$|^(?:gloo|nccl):|^Optimizer\.")
"""Ranges of ours and of torch that are no actions."""
_RECEIVE = re.compile(r"(?:gloo|nccl|mpi|ucc):recv")
"""A process group's name for a receive. Within an action that begins with the wait for its input, it is that wait."""
IN_TURNS = (
    "one process ran all ranks in turns, so none waited for another; record a run with a process for each rank "
    "(penstock run), or simulate these times"
)
_ANNOTATIONS = ("user_annotation", _ON_DEVICE)
_OPERATIONS = re.compile(
    rb',\n  \{(?:\n    (?!(?:"ph": "X", )?"cat").*)*+\n    (?:"ph": "X", )?"cat": "(?!(?:gpu_)?user_annotation")'
    rb".*(?:\n    .*)*+\n  \}(?=[,\n])"
)
"""Kineto's other events in its own layout, most of a file: operations and kernels, whose names are no actions.
No string of JSON has a line break in it."""


def without_operations(data: bytearray) -> bytes | bytearray:
    """Drop Kineto's operations and kernels from a trace; return it unchanged if it is not Kineto's."""
    return _OPERATIONS.sub(b"", data) if b'"schemaVersion"' in data[:1000] else data


def read_chrome(
    events: Any, header: Mapping[str, Any], file: str, number: int, pattern: Pattern[str] | None = None
) -> TraceData:
    """Read one file. A file is one process, unless several of its processes name actions.

    Args:
        events: the list of trace events.
        header: the file's other fields; Kineto's `distributedInfo` has the rank and the world size.
        file: its name, whose last number is the rank if nothing else gives it.
        number: the file's index among those that are read.
        pattern: the user's pattern of names, in addition to the table's.
    """
    entries = events if isinstance(events, list) else []
    _check_times(entries, pattern)
    complete = _complete_events(entries)
    named_events = [(event, read_name(event.get("name"), event.get("args"), pattern)) for event in complete]
    ranges = [(event, named) for event, named in named_events if named is not None and named.op.is_compute]
    on_device = any(event.get("cat") == _ON_DEVICE for event, _ in ranges)
    numbered = any("microbatch" in named.numbers for _, named in ranges)
    ranges = [
        (event, named)
        for event, named in ranges
        if (event.get("cat") == _ON_DEVICE) == on_device and ("microbatch" in named.numbers) == numbered
    ]
    processes = sorted({_id(event, "pid") for event, _ in ranges}, key=lambda pid: (isinstance(pid, str), pid))
    process_ranks = {process: index for index, process in enumerate(processes)}
    marks, file_rank = _step_marks(complete), _rank(header, file, number)
    received: defaultdict[int | str, list[tuple[float, float]]] = defaultdict(list)
    for event in complete:
        if _RECEIVE.match(str(event.get("name"))):
            received[_id(event, "pid")].append(_start_and_end(event))
    actions = []
    ops = {named.op for _, named in ranges}
    b_is_i = Op.W in ops and Op.I not in ops  # the letters of the papers on zero bubbles
    for event, named in ranges:
        (start, end), numbers = _start_and_end(event), named.numbers
        if named.waits:
            receives = received[_id(event, "pid")]
            within = receives[bisect.bisect(receives, (start,)) : bisect.bisect(receives, (end,))]
            start = max([start, *(arrived for _, arrived in within if arrived <= end)])
        rank = process_ranks[_id(event, "pid")] if len(processes) > 1 else file_rank
        op = Op.I if b_is_i and named.op is Op.B else named.op
        action = Action(numbers.get("stage", rank), op, numbers.get("microbatch", 0))
        mark_index = bisect.bisect_right(marks, start, key=itemgetter(0)) - 1
        step = numbers["step"] if "step" in numbers else marks[max(0, mark_index)][1] if marks else None
        chunk = None if "stage" in numbers else numbers.get("chunk")
        source = ("process", rank)
        actions.append(Event(source, str(action), start, end, action, step, chunk=chunk, counted=not numbered))
    waits = not on_device and any(named.waits for _, named in ranges)
    sent = (named.numbers.get("stage", 0) for _, named in named_events if named is not None and named.op is Op.SEND_F)
    # metadata of every process of our own traces: the number of stages, and how ranks ran
    args = (e.get("args") for e in entries if isinstance(e, dict) and e.get("name") == STAGES_METADATA)
    labels = [entry for entry in args if isinstance(entry, dict)]
    if any(entry.get("in_turns") for entry in labels):
        raise ArgumentError(f"{file}: {IN_TURNS}")
    stages = max(
        [2 + stage for stage in sent] + [entry["stages"] for entry in labels if type(entry.get("stages")) is int] + [0]
    )
    crowded = labels[0].get("crowded") is True if labels and "crowded" in labels[0] else None
    job = header.get("distributedInfo")
    world = job.get("world_size") if isinstance(job, Mapping) else 0
    unread = _count_unread(named_events, numbered)
    return TraceData(tuple(actions), waits, (), stages, unread, crowded, world if isinstance(world, int) else 0)


def _count_unread(named_events: Sequence[tuple[Mapping[str, Any], ParsedName | None]], numbered: bool) -> Counter[str]:
    """Count the names of ranges that are no actions; of a profiler's events, those of user code only."""
    annotated = any(event.get("cat") in _ANNOTATIONS for event, _ in named_events)
    return Counter(
        str(event.get("name"))
        for event, named in named_events
        if (not annotated or event.get("cat") in _ANNOTATIONS)
        and (named is None or (numbered and named.op.is_compute and "microbatch" not in named.numbers))
        and not _SKIPPED.search(str(event.get("name")))
    )


def _check_times(events: Sequence[Any], pattern: Pattern[str] | None) -> None:
    """Raise ArgumentError if an event that names an action is at no time."""
    for event in events:
        timeless = isinstance(event, dict) and "ts" in event and not _is_time(event["ts"])
        if timeless and read_name(event.get("name"), event.get("args"), pattern) is not None:
            raise ArgumentError(
                f"the trace's event {quoted(event.get('name'))} is at ts {quoted(event['ts'])}; expected a number of "
                "microseconds"
            )


def _rank(header: Mapping[str, Any], file: str, number: int) -> int:
    job = header.get("distributedInfo")
    if isinstance(job, Mapping) and isinstance(job.get("rank"), int):
        return int(job["rank"])
    numbers = re.findall(r"rank[-_ ]?(\d+)", file, re.IGNORECASE) or re.findall(r"\d+", file.split(".")[0])
    return int(numbers[-1]) if numbers else number


def _complete_events(events: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Events with a start and a duration; a begin (B) becomes one with its end (E), the next of its name or at all."""
    complete: list[Mapping[str, Any]] = []
    open_ranges: defaultdict[tuple[int | str, int | str], list[Mapping[str, Any]]] = defaultdict(list)
    timed = (event for event in events if isinstance(event, dict) and _is_time(event.get("ts")))
    for event in sorted(timed, key=_timestamp):  # in the file's order where times are equal
        if event.get("ph") == "X":
            complete.append(event)
            continue
        thread = open_ranges[_id(event, "pid"), _id(event, "tid")]
        if event.get("ph") == "B":
            thread.append(event)
        elif event.get("ph") == "E" and thread:
            innermost = thread[: -_MAX_OPEN - 1 : -1]
            same_name = (n for n, begin in enumerate(innermost) if begin.get("name") == event.get("name"))
            begin = thread.pop(-1 - next(same_name, 0))
            complete.append({**begin, "dur": event["ts"] - begin["ts"]})
    return sorted(complete, key=_timestamp)


def _timestamp(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _is_time(value: Any) -> bool:
    return is_number(value) and abs(value) < 1e300


def _id(event: Mapping[str, Any], key: str) -> int | str:
    """Return the number or name of an event's process or thread; 0 if it has none."""
    value = event.get(key, 0)
    return value if isinstance(value, (int, str)) else str(value)


def _start_and_end(event: Mapping[str, Any]) -> tuple[float, float]:
    """Return when a range starts and ends, in seconds."""
    start = event["ts"] / 1e6
    duration = event.get("dur")
    if duration is None or not _is_time(duration) or duration < 0:
        raise ArgumentError(
            f"the trace's event {quoted(event.get('name'))} at ts {event['ts']} has the duration {quoted(duration)}; "
            "expected microseconds of 0 or more"
        )
    return start, start + duration / 1e6


def _step_marks(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """Return when steps begin by the profiler's own marks, and their numbers, ascending."""
    starts: dict[int, float] = {}
    for event in events:
        if isinstance(event.get("name"), str) and (mark := _STEP.fullmatch(event["name"])):
            starts.setdefault(int(mark[1]), event["ts"] / 1e6)
    return sorted((start, number) for number, start in starts.items())

"""Traces in Chrome's format: our own, torch's profiler's (Kineto), and others whose events name the actions."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from re import Pattern
from typing import Any

from penstock._base.errors import ArgumentError, is_number
from penstock._base.files import quoted
from penstock.schedule import Action, Op
from penstock.trace.event import Event, TraceData
from penstock.trace.names import STAGES_SAID_BY, Named, read_name

_STEP = re.compile(r"(?:ProfilerStep#|iter_[0-9]+_)([0-9]{1,18})")
"""Marks of torch's profiler, and of sail-sg's zero bubble, behind the rank."""
_MAX_OPEN = 50
"""Events of a thread that have begun and not ended, among which the one that ends is looked for: the last."""
_ON_DEVICE = "gpu_user_annotation"
"""Kineto's category of a range as the device saw it; the host only gave it work."""
_SKIPPED = re.compile(rf"^{_STEP.pattern}$|\bwaits?$|^(?:gloo|nccl):|^Optimizer\.")
"""Ranges of ours and of torch that are no actions."""
_RECEIVE = re.compile(r"(?:gloo|nccl|mpi|ucc):recv")
"""What a process group calls a receive: within an action that begins with the wait for its input, that wait."""
IN_TURNS = (
    "one process ran all ranks in turns, so none waited for another; record a run with a process for each rank "
    "(penstock run), or simulate these times"
)
_ANNOTATIONS = ("user_annotation", _ON_DEVICE)
_OPERATIONS = re.compile(
    rb',\n  \{(?:\n    (?!(?:"ph": "X", )?"cat").*)*+\n    (?:"ph": "X", )?"cat": "(?!(?:gpu_)?user_annotation")'
    rb".*(?:\n    .*)*+\n  \}(?=[,\n])"
)
"""Kineto's other events in its own layout, most of a file by far: operations and kernels, whose names are no actions.
No string of JSON has a line break in it."""


def without_operations(data: bytearray) -> bytes | bytearray:
    """Drop Kineto's operations and kernels from a trace; return it unchanged if it is not Kineto's."""
    return _OPERATIONS.sub(b"", data) if b'"schemaVersion"' in data[:1000] else data


def read_chrome(
    events: Any, header: Mapping[str, Any], file: str, number: int, own: Pattern[str] | None = None
) -> TraceData:
    """Read one file. A file is one process, unless several of its processes name actions.

    Args:
        events: the list of trace events.
        header: what else the file has; Kineto's `distributedInfo` tells the rank, and how many there are.
        file: its name, whose last number is the rank if nothing else says it.
        number: the file's place among those that are read.
        own: the user's pattern of names, besides the table's.
    """
    every = events if isinstance(events, list) else []
    _check_times(every, own)
    complete = _complete(every)
    read = [(event, read_name(event.get("name"), event.get("args"), own)) for event in complete]
    ranges = [(event, named) for event, named in read if named is not None and named.op.is_compute]
    on_device = any(event.get("cat") == _ON_DEVICE for event, _ in ranges)
    numbered = any("microbatch" in named.numbers for _, named in ranges)
    ranges = [
        (event, named)
        for event, named in ranges
        if (event.get("cat") == _ON_DEVICE) == on_device and ("microbatch" in named.numbers) == numbered
    ]
    processes = sorted({_id(event, "pid") for event, _ in ranges}, key=lambda pid: (isinstance(pid, str), pid))
    places = {process: place for place, process in enumerate(processes)}
    marks, alone = _steps(complete), _rank(header, file, number)
    received: defaultdict[int | str, list[tuple[float, float]]] = defaultdict(list)
    for event in complete:
        if _RECEIVE.match(str(event.get("name"))):
            received[_id(event, "pid")].append(_times(event))
    made = []
    ops = {named.op for _, named in ranges}
    b_is_i = Op.W in ops and Op.I not in ops  # the letters of the papers on zero bubbles
    for event, named in ranges:
        (start, end), numbers = _times(event), named.numbers
        if named.waits:
            own_ones = received[_id(event, "pid")]
            within = own_ones[bisect.bisect(own_ones, (start,)) : bisect.bisect(own_ones, (end,))]
            start = max([start, *(arrived for _, arrived in within if arrived <= end)])
        rank = places[_id(event, "pid")] if len(processes) > 1 else alone
        op = Op.I if b_is_i and named.op is Op.B else named.op
        action = Action(numbers.get("stage", rank), op, numbers.get("microbatch", 0))
        marked = bisect.bisect_right(marks, start, key=itemgetter(0)) - 1
        step = numbers["step"] if "step" in numbers else marks[max(0, marked)][1] if marks else None
        chunk = None if "stage" in numbers else numbers.get("chunk")
        source = ("process", rank)
        made.append(Event(source, str(action), start, end, action, step, chunk=chunk, counted=not numbered))
    waits = not on_device and any(named.waits for _, named in ranges)
    sent = (named.numbers.get("stage", 0) for _, named in read if named is not None and named.op is Op.SEND_F)
    # what each process of our own traces says of the whole: how many stages there are, and how ranks ran
    args = (one.get("args") for one in every if isinstance(one, dict) and one.get("name") == STAGES_SAID_BY)
    said = [one for one in args if isinstance(one, dict)]
    if any(one.get("in_turns") for one in said):
        raise ArgumentError(f"{file}: {IN_TURNS}")
    stages = max(
        [2 + stage for stage in sent] + [one["stages"] for one in said if type(one.get("stages")) is int] + [0]
    )
    crowded = said[0].get("crowded") is True if said and "crowded" in said[0] else None
    told = header.get("distributedInfo")
    world = told.get("world_size") if isinstance(told, Mapping) else 0
    unread = _unread(read, numbered)
    return TraceData(tuple(made), waits, (), stages, unread, crowded, world if isinstance(world, int) else 0)


def _unread(read: Sequence[tuple[Mapping[str, Any], Named | None]], numbered: bool) -> Counter[str]:
    """Count the names of ranges that are no actions; of a profiler's events, those of user code only."""
    annotated = any(event.get("cat") in _ANNOTATIONS for event, _ in read)
    return Counter(
        str(event.get("name"))
        for event, named in read
        if (not annotated or event.get("cat") in _ANNOTATIONS)
        and (named is None or (numbered and named.op.is_compute and "microbatch" not in named.numbers))
        and not _SKIPPED.search(str(event.get("name")))
    )


def _check_times(events: Sequence[Any], own: Pattern[str] | None) -> None:
    """Raise ArgumentError if an event that names an action is at no time."""
    for event in events:
        timeless = isinstance(event, dict) and "ts" in event and not _is_time(event["ts"])
        if timeless and read_name(event.get("name"), event.get("args"), own) is not None:
            raise ArgumentError(
                f"the trace's event {quoted(event.get('name'))} is at ts {quoted(event['ts'])}; expected a number of "
                "microseconds"
            )


def _rank(header: Mapping[str, Any], file: str, number: int) -> int:
    told = header.get("distributedInfo")
    if isinstance(told, Mapping) and isinstance(told.get("rank"), int):
        return int(told["rank"])
    numbers = re.findall(r"rank[-_ ]?(\d+)", file, re.IGNORECASE) or re.findall(r"\d+", file.split(".")[0])
    return int(numbers[-1]) if numbers else number


def _complete(events: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Events with a start and a duration; a begin (B) and its end (E) become one."""
    found: list[Mapping[str, Any]] = []
    begun: defaultdict[tuple[int | str, int | str], list[Mapping[str, Any]]] = defaultdict(list)
    timed = (event for event in events if isinstance(event, dict) and _is_time(event.get("ts")))
    for _, at_once in groupby(sorted(timed, key=_at), key=_at):
        ends = []
        for event in at_once:
            if event.get("ph") == "X":
                found.append(event)
            elif event.get("ph") == "B":
                begun[_id(event, "pid"), _id(event, "tid")].append(event)
            elif event.get("ph") == "E":
                ends.append(event)
        for end in ends:  # only now: what is shorter than the clock's tick ends when it begins
            if open_ones := begun[_id(end, "pid"), _id(end, "tid")]:
                deepest = open_ones[-_MAX_OPEN:]
                first = open_ones.pop(_begin_of(end, deepest) - len(deepest))
                found.append({**first, "dur": end["ts"] - first["ts"]})
    return sorted(found, key=_at)


def _begin_of(end: Mapping[str, Any], begun: Sequence[Mapping[str, Any]]) -> int:
    """Return which of the open ranges ends: the innermost of its name, or of all, that began before, or else just
    now."""
    alike = [number for number, one in enumerate(begun) if one.get("name") == end.get("name")] or [*range(len(begun))]
    before = [number for number in alike if _at(begun[number]) < _at(end)]
    return (before or alike)[-1]


def _at(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _is_time(value: Any) -> bool:
    return is_number(value) and abs(value) < 1e300


def _id(event: Mapping[str, Any], key: str) -> int | str:
    """Return the number or name of an event's process or thread; 0 if it has none."""
    value = event.get(key, 0)
    return value if isinstance(value, (int, str)) else str(value)


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    """Return when a range starts and ends, in seconds."""
    start = event["ts"] / 1e6
    lasted = event.get("dur")
    if lasted is None or not _is_time(lasted) or lasted < 0:
        raise ArgumentError(
            f"the trace's event {quoted(event.get('name'))} at ts {event['ts']} has the duration {quoted(lasted)}; "
            "expected microseconds of 0 or more"
        )
    return start, start + lasted / 1e6


def _steps(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """Return when steps begin by the profiler's own marks, and their numbers, ascending."""
    found: dict[int, float] = {}
    for event in events:
        if isinstance(event.get("name"), str) and (mark := _STEP.fullmatch(event["name"])):
            found.setdefault(int(mark[1]), event["ts"] / 1e6)
    return sorted((start, number) for number, start in found.items())

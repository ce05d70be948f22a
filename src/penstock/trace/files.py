"""Files of a run -> a `Recording`: our timelines, Chrome's trace events (Perfetto, Kineto), and columns of events."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from penstock._base.errors import ArgumentError
from penstock._base.files import quoted, read_json, read_text
from penstock.schedule import Op
from penstock.schedule.timeline import Timeline
from penstock.trace.chrome import IN_TURNS, read_chrome, without_operations
from penstock.trace.event import Event, TraceData, numbered
from penstock.trace.names import OPS, own_pattern
from penstock.trace.runs import RecordedRun, is_run
from penstock.trace.runs import read_run as read_folder
from penstock.trace.tables import read_columns, read_lists

_MAX_NAMED = 4
_UNLIKE = 1.25
"""Times as long: the steps that were recorded then say little about the others."""
_RECENT_BYTES = 64_000
"""Of the file of steps."""
SUFFIXES = (".json", ".json.gz", ".csv", ".csv.gz")
"""Files that a folder is searched for."""


def load_trace(paths: Sequence[str | os.PathLike[str]], pattern: str | None = None) -> TraceData:
    """Read the files of a run; of a folder, all JSON and CSV, compressed by gzip or not; of a folder that
    `penstock.pipeline(run_dir=...)` recorded, its timelines, by the numbers of their steps.

    A file is a timeline as `Timeline.to_dict` writes it (or a list of them, a step each), a trace in Chrome's format
    whose events name the actions, or columns: op, microbatch, start_us and duration_us, with step, dp_rank and pp_rank.

    Args:
        paths: the files or folders.
        pattern: a regular expression for the names of other tools' events, besides those of `explain.names`, with the
            groups `op`, `microbatch` and, where it is not the process's only one, `stage`.

    Raises:
        ArgumentError: a file cannot be read, or no event names an action.
    """
    own = own_pattern(pattern)
    if len(paths) == 1 and is_run(paths[0]):
        return recording_of_run(read_folder(paths[0]))
    files = [file for path in paths for file in _files(Path(path))]
    was = gc.isenabled()
    gc.disable()  # of millions of new objects none is garbage, and looking for it takes a third of the time
    try:
        found = [_read(file, number, own) for number, file in enumerate(files)]
        first: dict[object, int] = {}
        for number, one in enumerate(found):
            other = first.setdefault(one.events[:1], number)
            if one.events and other < number and one.events == found[other].events:
                raise ArgumentError(f"{files[number]} is the same trace as {files[other]}; pass each once")
        events = numbered([event for one in found for event in one.events])
    finally:
        if was:
            gc.enable()
    unread = sum((Counter(one.unread) for one in found), Counter())
    others = unread + Counter(event.name for event in events if event.action is None)
    named = ", ".join(quoted(name) for name, _ in others.most_common(_MAX_NAMED))
    if not any(event.action is not None for event in events):
        raise ArgumentError(
            f"{', '.join(map(str, paths))}: no event names an action of a pipeline"
            f"{f'; their names are {named}' if named else ''}. Expected names such as 2F3 (stage, op, microbatch), "
            "PP:2F3, 'Forward 3', 'F 2 3' or 'fwd mb3', arguments stage and microbatch, or columns op, microbatch, "
            f"start_us, duration_us, where op is one of {', '.join(OPS)}; --pattern reads others. Schedule1F1B of "
            "torch.distributed.pipelining marks none (2.13); others do"
        )
    notes = tuple(dict.fromkeys(note for one in found for note in one.notes))
    ranks = sorted({event.source[-1] for event in events if event.computes}, key=str)
    world = max(one.world for one in found)
    if len(ranks) < world:
        traces = f"of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} of {world}"
        if len(ranks) == 1:
            raise ArgumentError(
                f"{', '.join(map(str, paths))}: the trace {traces} alone; pass those of the others, too"
            )
        notes += (f"the traces are {traces}; pass those of the others, too, unless they are of other pipelines",)
    if missed := unread.total():
        notes += (f"{missed} of {missed + len(events)} events are not read, such as {named}; --pattern reads others",)
    waits, crowded = any(one.with_waits for one in found), [one.crowded for one in found if one.crowded is not None]
    return TraceData(events, waits, notes, max(one.stages for one in found), crowded=any(crowded) if crowded else None)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted((file for file in path.iterdir() if file.name.endswith(SUFFIXES)), key=_in_order)
    if not found:
        runs = sorted(folder.name for folder in path.iterdir() if is_run(folder))[:4]
        hint = f"; it has runs in it: {', '.join(runs)}" if runs else ""
        raise ArgumentError(f"{path} has no file that ends in {', '.join(SUFFIXES)}{hint}")
    return found


def _in_order(file: Path) -> list[tuple[int, int | str]]:
    """rank2 comes before rank10."""
    parts = re.findall(r"\d+|\D+", file.name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _read(file: Path, number: int, own: re.Pattern[str] | None) -> TraceData:
    if file.name.removesuffix(".gz").endswith(".csv"):
        return read_columns(read_text(file), str(file), own)
    given = read_json(file, thin=None if own else without_operations)
    if isinstance(given, dict) and "traceEvents" in given:
        return read_chrome(given["traceEvents"], given, file.name, number, own)
    timelines = given if isinstance(given, list) else [given]
    if timelines and all(isinstance(one, dict) and "ranks" in one for one in timelines):
        return recording_of([Timeline.from_dict(one, str(file)) for one in timelines], str(file))
    if isinstance(given, list) and any(isinstance(one, dict) and "ph" in one for one in given):
        return read_chrome(given, {}, file.name, number, own)
    if (found := read_lists(given, str(file), own)) is not None:
        return found
    if isinstance(given, dict) and "pipeline_seconds" in given:
        raise ArgumentError(f"{file} is a plan: pass a recorded run, and this as --plan; penstock report draws a plan")
    raise ArgumentError(
        f"{file}: expected a timeline (ranks), a trace in Chrome's format (traceEvents), or lists of rows or columns"
    )


def recording_of_run(run: RecordedRun) -> TraceData:
    """Return the timelines that a run has recorded. Raise ArgumentError if there is none."""
    timelines, damaged = run.timelines()
    if not timelines:
        why = "; ".join(damaged) or "the first is of step 5, unless trace_every is 0"
        raise ArgumentError(f"run {str(run.path)!r} has no timeline: {why}")
    found = recording_of(list(timelines.values()), str(run.path), list(timelines))
    steps = run.steps(_RECENT_BYTES)
    noted: list[str] = []
    timed = [one.seconds for one in steps if one.step in timelines]
    if timed and not 1 / _UNLIKE < (times := median(one.seconds for one in steps) / median(timed)) < _UNLIKE:
        noted.append(f"the last {len(steps):,} steps took {times:.2f} times as long as those with a timeline")
    return replace(found, stages=run.about.stages.stages, notes=(*damaged, *noted, *found.notes))


def recording_of(timelines: Sequence[Timeline], file: str = "", steps: Sequence[int] = ()) -> TraceData:
    """Return the recording of the timelines of some steps, as the runtime or the simulator made them.

    Args:
        file: where they are from, for messages.
        steps: their numbers; empty: in order, from 0, if there are several.

    Raises:
        ArgumentError: ranks took turns in one process.
    """
    if any(timeline.serialized for timeline in timelines):
        raise ArgumentError(f"{file or 'the timeline'}: {IN_TURNS}")
    numbers: Sequence[int | None] = steps or (range(len(timelines)) if len(timelines) > 1 else [None])
    spans = [(step, span) for timeline, step in zip(timelines, numbers, strict=True) for span in timeline]
    events = tuple(
        Event(("rank", s.rank), str(s.action), s.start_seconds, s.end_seconds, s.action, step, s.rank, 0)
        for step, s in spans
        if s.action.op.is_compute
    )
    stages = max((2 + s.action.stage for _, s in spans if s.action.op is Op.SEND_F), default=0)
    return TraceData(events, stages=stages, crowded=any(timeline.crowded for timeline in timelines))

"""Reads a run's files, telling formats apart: our timelines, Chrome's trace events (Perfetto, Kineto), columns."""

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
from penstock.trace.columns import read_columns, read_lists
from penstock.trace.event import Event, TraceData, number_events
from penstock.trace.names import OPS, compile_pattern
from penstock.trace.runs import RecordedRun, is_run
from penstock.trace.runs import read_run as read_folder

_MAX_NAMED = 4
_MAX_RATIO = 1.25
"""Ratio of step times beyond which the recorded steps are not representative."""
_RECENT_BYTES = 64_000
"""How much of the end of the file of steps is read."""
SUFFIXES = (".json", ".json.gz", ".csv", ".csv.gz")
"""Files that a folder is searched for."""


def load_trace(paths: Sequence[str | os.PathLike[str]], pattern: str | None = None) -> TraceData:
    """Read the files of a run; of a folder, all JSON and CSV, compressed by gzip or not; of a folder that
    `penstock.pipeline(run_dir=...)` recorded, its timelines, by the numbers of their steps.

    A file is a timeline as `Timeline.to_dict` writes it (or a list of them, a step each), a trace in Chrome's format
    whose events name the actions, or columns: op, microbatch, start_us and duration_us, with step, dp_rank and pp_rank.

    Args:
        paths: the files or folders.
        pattern: a regular expression for the names of other tools' events, in addition to those of `trace.names`, with
            the groups `op`, `microbatch` and, where it is not the process's only one, `stage`.

    Raises:
        ArgumentError: a file cannot be read, or no event names an action.
    """
    compiled = compile_pattern(pattern)
    if len(paths) == 1 and is_run(paths[0]):
        return recording_from_run(read_folder(paths[0]))
    files = [file for path in paths for file in _files(Path(path))]
    gc_was_enabled = gc.isenabled()
    gc.disable()  # of millions of new objects none is garbage, and looking for it takes a third of the time
    try:
        recordings = [_read(file, number, compiled) for number, file in enumerate(files)]
        first_index: dict[object, int] = {}
        for number, recording in enumerate(recordings):
            earlier = first_index.setdefault(recording.events[:1], number)
            if recording.events and earlier < number and recording.events == recordings[earlier].events:
                raise ArgumentError(f"{files[number]} is the same trace as {files[earlier]}; pass each once")
        events = number_events([event for recording in recordings for event in recording.events])
    finally:
        if gc_was_enabled:
            gc.enable()
    unread = sum((Counter(recording.unread) for recording in recordings), Counter())
    unused = unread + Counter(event.name for event in events if event.action is None)
    names = ", ".join(quoted(name) for name, _ in unused.most_common(_MAX_NAMED))
    if not any(event.action is not None for event in events):
        raise ArgumentError(
            f"{', '.join(map(str, paths))}: no event names an action of a pipeline"
            f"{f'; their names are {names}' if names else ''}. Expected names such as 2F3 (stage, op, microbatch), "
            "PP:2F3, 'Forward 3', 'F 2 3' or 'fwd mb3', arguments stage and microbatch, or columns op, microbatch, "
            f"start_us, duration_us, where op is one of {', '.join(OPS)}; --pattern reads others. Schedule1F1B of "
            "torch.distributed.pipelining marks none (2.13); others do"
        )
    notes = tuple(dict.fromkeys(note for recording in recordings for note in recording.notes))
    ranks = sorted({event.source[-1] for event in events if event.computes}, key=str)
    world = max(recording.world for recording in recordings)
    if len(ranks) < world:
        traces = f"of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} of {world}"
        if len(ranks) == 1:
            raise ArgumentError(
                f"{', '.join(map(str, paths))}: the trace {traces} alone; pass those of the others, too"
            )
        notes += (f"the traces are {traces}; pass those of the others, too, unless they are of other pipelines",)
    if skipped := unread.total():
        notes += (f"{skipped} of {skipped + len(events)} events are not read, such as {names}; --pattern reads others",)
    waits, crowded = any(r.with_waits for r in recordings), [r.crowded for r in recordings if r.crowded is not None]
    return TraceData(events, waits, notes, max(r.stages for r in recordings), crowded=any(crowded) if crowded else None)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted((file for file in path.iterdir() if file.name.endswith(SUFFIXES)), key=_natural_key)
    if not files:
        runs = sorted(folder.name for folder in path.iterdir() if is_run(folder))[:4]
        hint = f"; it has runs in it: {', '.join(runs)}" if runs else ""
        raise ArgumentError(f"{path} has no file that ends in {', '.join(SUFFIXES)}{hint}")
    return files


def _natural_key(file: Path) -> list[tuple[int, int | str]]:
    """rank2 comes before rank10."""
    parts = re.findall(r"\d+|\D+", file.name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _read(file: Path, number: int, pattern: re.Pattern[str] | None) -> TraceData:
    if file.name.removesuffix(".gz").endswith(".csv"):
        return read_columns(read_text(file), str(file), pattern)
    data = read_json(file, thin=None if pattern else without_operations)
    if isinstance(data, dict) and "traceEvents" in data:
        return read_chrome(data["traceEvents"], data, file.name, number, pattern)
    timelines = data if isinstance(data, list) else [data]
    if timelines and all(isinstance(item, dict) and "ranks" in item for item in timelines):
        return recording_from_timelines([Timeline.from_dict(item, str(file)) for item in timelines], str(file))
    if isinstance(data, list) and any(isinstance(item, dict) and "ph" in item for item in data):
        return read_chrome(data, {}, file.name, number, pattern)
    if (recording := read_lists(data, str(file), pattern)) is not None:
        return recording
    if isinstance(data, dict) and "pipeline_seconds" in data:
        raise ArgumentError(f"{file} is a plan: pass a recorded run, and this as --plan; penstock report draws a plan")
    raise ArgumentError(
        f"{file}: expected a timeline (ranks), a trace in Chrome's format (traceEvents), or lists of rows or columns"
    )


def recording_from_run(run: RecordedRun) -> TraceData:
    """Return the timelines that a run has recorded. Raise ArgumentError if there is none."""
    timelines, damaged = run.timelines()
    if not timelines:
        reason = "; ".join(damaged) or "the first is of step 5, unless trace_every is 0"
        raise ArgumentError(f"run {str(run.path)!r} has no timeline: {reason}")
    recording = recording_from_timelines(list(timelines.values()), str(run.path), list(timelines))
    steps = run.steps(_RECENT_BYTES)
    notes = [*damaged]
    traced = [record.seconds for record in steps if record.step in timelines]
    if traced and not 1 / _MAX_RATIO < (ratio := median(r.seconds for r in steps) / median(traced)) < _MAX_RATIO:
        notes.append(f"the last {len(steps):,} steps took {ratio:.2f} times as long as those with a timeline")
    notes += recording.notes
    return replace(recording, stages=run.about.stages.stages, notes=tuple(notes), about=run.about)


def recording_from_timelines(timelines: Sequence[Timeline], file: str = "", steps: Sequence[int] = ()) -> TraceData:
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

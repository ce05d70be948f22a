"""Reads the folder of a run, also while it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError
from penstock._base.files import MAX_BYTES, json_or_none, read_bytes, read_json, validate
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline
from penstock.trace.runs.about import FORMAT, RunInfo
from penstock.trace.runs.folder import ABOUT, MEMORY, PREDICTED, PREDICTED_MEMORY, RANKS, STEPS, TIMELINES, list_numbers
from penstock.trace.runs.records import RankState, StepRecord


@dataclass(frozen=True, slots=True)
class RecordedPrediction:
    """The prediction of a plan or a profile before the run.

    Attributes:
        source: where it is from, in words.
        step_seconds: of a whole step, without the optimizer.
        stage_seconds: F + I + W of one microbatch on each stage.
        timeline: of a step.
    """

    source: str
    step_seconds: float
    stage_seconds: tuple[float, ...]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """The memory of a rank in a step.

    Attributes:
        bytes: after each action of the rank's track in the step's timeline.
        measured: whether its device had allocated that; otherwise it follows from the schedule and the stages'
            bytes: parameters, gradients, Adam's state and activations, without what an action needs while it runs.
    """

    rank: int
    bytes: tuple[int, ...]
    measured: bool


@accept_old_names(timeline_steps="traced_steps")
@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run, as its folder shows it at each call.

    Attributes:
        about: what does not change.
    """

    path: Path
    about: RunInfo

    def steps(self, most_bytes: int | None = None) -> list[StepRecord]:
        """Return all steps so far, by number, or those in the last `most_bytes` of the file. If a step ran twice, after
        a resumption, the later record wins."""
        file = self.path / STEPS
        start = max(0, file.stat().st_size - most_bytes) if most_bytes is not None and file.exists() else 0
        return merge_steps([], self.steps_after(start)[0])

    def steps_after(self, offset: int) -> tuple[list[StepRecord], int]:
        """Return the steps that were added after an offset in the file (0: all), in order of writing, and the offset
        after them. Of more than `MAX_BYTES`, only the last are read.

        `merge_steps` joins the lists of several calls. For an offset beyond the end, as after another run began in the
        folder, return an empty list and 0.
        """
        file = self.path / STEPS
        size = file.stat().st_size if file.exists() else -1
        if size < offset:
            return [], 0
        offset = max(offset, size - MAX_BYTES)
        text = read_bytes(file, max_bytes=2 * MAX_BYTES, start=offset)  # it may grow meanwhile
        complete = text[: text.rfind(b"\n") + 1]
        records = map(StepRecord.from_line, io.BytesIO(complete))
        return [record for record in records if record is not None], offset + len(complete)

    def traced_steps(self) -> list[int]:
        """Return the steps that have timelines, ascending."""
        return list_numbers(self.path / TIMELINES)

    def timeline(self, step: int) -> Timeline:
        """Return when each rank's actions ran in a step. Raise ArgumentError if that was not recorded."""
        file = self.path / TIMELINES / f"{step}.json"
        if not file.exists():
            recorded = ", ".join(map(str, self.traced_steps()[-8:])) or "none yet"
            raise ArgumentError(f"run {str(self.path)!r} has no timeline of step {step}; there are: {recorded}")
        label = f"timeline {str(file)!r}"
        return Timeline.from_dict(read_json(file, label), label)

    def timelines(self) -> tuple[dict[int, Timeline], list[str]]:
        """Return all timelines, by step, and a sentence for each that is damaged, as by a copy cut short."""
        timelines: dict[int, Timeline] = {}
        damaged = []
        for step in self.traced_steps():
            try:
                timelines[step] = self.timeline(step)
            except ArgumentError as error:
                damaged.append(f"step {step} is left out: {error}")
        return timelines, damaged

    def schedule(self, step: int) -> Schedule:
        """Return the schedule of a step that has a timeline, communication included."""
        rows = [track.actions for track in self.timeline(step).tracks]
        numbers = [action.microbatch for row in rows for action in row if action.op.is_compute]
        microbatches = 1 + max((number for number in numbers if number is not None), default=0)
        return Schedule(self.about.schedule, self.about.stages, microbatches, rows)

    def predicted(self) -> RecordedPrediction | None:
        """Return what a plan or a profile predicted before the run; None if there was none."""
        file = self.path / PREDICTED
        if not file.exists():
            return None
        label = f"prediction {str(file)!r}"
        data = validate(dict[str, Any], read_json(file, label), label)
        return RecordedPrediction(
            validate(str, data.get("source"), f"{label}: source"),
            validate(float, data.get("step_seconds"), f"{label}: step_seconds"),
            validate(tuple[float, ...], data.get("stage_seconds"), f"{label}: stage_seconds"),
            Timeline.from_dict(data.get("timeline"), label),
        )

    def memory(self, step: int) -> tuple[MemoryTrace, ...]:
        """Return the memory of ranks in a step that has a timeline, of those for which it is known: as measured, or
        else as predicted."""
        lengths = [len(track) for track in self.timeline(step).tracks]
        predicted = json_or_none(self.path / PREDICTED_MEMORY)
        traces = []
        for rank, length in enumerate(lengths):
            measured = json_or_none(self.path / MEMORY / f"{step}.{rank}.json")
            if _fits(measured, length):
                traces.append(MemoryTrace(rank, tuple(measured), True))
            elif isinstance(predicted, list) and len(predicted) == len(lengths) and _fits(predicted[rank], length):
                traces.append(MemoryTrace(rank, tuple(predicted[rank]), False))
        return tuple(traces)

    def ranks(self) -> list[RankState]:
        """Return what every process does, by number: as it reports itself, or as relayed by process 0 if it writes
        elsewhere."""
        return self.ranks_and_damage()[0]

    def ranks_and_damage(self) -> tuple[list[RankState], list[str]]:
        """Return the states of `ranks`, and a sentence for each damaged file."""
        states: dict[int, RankState] = {}
        damaged = []
        for number in list_numbers(self.path / RANKS):
            file = self.path / RANKS / f"{number}.json"
            label = f"state {str(file)!r}"
            try:
                data = read_json(file, label)
                if not isinstance(data, dict) or data.get("run") != self.about.id:
                    continue  # of another run in this folder
                state = RankState.from_dict(data.get("state"), data.get("at"), label)
                relayed = validate(tuple[dict[str, Any], ...], data.get("heard", ()), f"{label}: heard")
                relayed_states = [RankState.from_dict(item, data.get("at"), label) for item in relayed]
            except ArgumentError as error:
                damaged.append(str(error))
                continue
            states = {s.number: replace(s, heard=True) for s in relayed_states} | states | {state.number: state}
        return [states[number] for number in sorted(states)], damaged


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has a run of penstock in it, of any version."""
    data = json_or_none(Path(path) / ABOUT)
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Read the run in a folder. Raise ArgumentError if there is none, or if another version or another tool wrote
    it."""
    folder = Path(path)
    name = f"run {os.fspath(path)!r}"
    fix = "a training script records one with penstock.pipeline(..., run_dir='runs/NAME')"
    if not folder.is_dir():
        raise ArgumentError(f"{name}: {'this is a file, not a folder' if folder.exists() else 'no such folder'}; {fix}")
    if not (folder / ABOUT).exists():
        names = sorted(file.parent.name for file in folder.glob(f"*/{ABOUT}"))[:4]
        hint = f"it has runs in it: {', '.join(names)}" if names else fix
        raise ArgumentError(f"{name}: there is no {ABOUT} in this folder; {hint}")
    return RecordedRun(folder, RunInfo.from_dict(read_json(folder / ABOUT, name), name))


def merge_steps(steps: list[StepRecord], added: Sequence[StepRecord]) -> list[StepRecord]:
    """Append steps in place, and return them by number. A step that is not greater than those before it replaces them:
    the run was resumed there."""
    for record in added:
        while steps and steps[-1].step >= record.step:
            steps.pop()
        steps.append(record)
    return steps


def _fits(sizes: Any, length: int) -> bool:
    is_list = isinstance(sizes, list) and len(sizes) == length
    return is_list and all(type(size) is int and 0 <= size < 1 << 63 for size in sizes)

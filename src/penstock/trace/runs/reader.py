"""Reads the folder of a run, also while it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import MAX_BYTES, json_or_none, read_bytes, read_json, validate
from penstock._base.second_names import formerly
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline
from penstock.trace.runs.about import FORMAT, RunInfo
from penstock.trace.runs.folder import ABOUT, MEMORY, PREDICTED, PREDICTED_MEMORY, RANKS, STEPS, TIMELINES, numbered
from penstock.trace.runs.records import RankState, StepRecord


@dataclass(frozen=True, slots=True)
class RecordedPrediction:
    """What a plan or a profile said before the run.

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
    """What a rank holds in a step.

    Attributes:
        bytes: after each action of the rank's track in the step's timeline.
        measured: whether its device had allocated that; otherwise it is what the schedule and the stages' bytes say:
            parameters, gradients, Adam's state and activations, without what an action needs while it runs.
    """

    rank: int
    bytes: tuple[int, ...]
    measured: bool


@formerly(timeline_steps="traced_steps")
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
        return joined([], self.steps_after(start)[0])

    def steps_after(self, place: int) -> tuple[list[StepRecord], int]:
        """Return the steps that were added after an offset in the file (0: all), in order of writing, and the offset
        after them: of more than `MAX_BYTES`, the last.

        `joined` makes one list of what several calls give. A place beyond the end, as after another run began in the
        folder, is an empty answer with place 0.
        """
        file = self.path / STEPS
        size = file.stat().st_size if file.exists() else -1
        if size < place:
            return [], 0
        place = max(place, size - MAX_BYTES)
        text = read_bytes(file, max_bytes=2 * MAX_BYTES, start=place)  # it may grow meanwhile
        whole = text[: text.rfind(b"\n") + 1]
        found = map(StepRecord.from_line, io.BytesIO(whole))
        return [one for one in found if one is not None], place + len(whole)

    def traced_steps(self) -> list[int]:
        """Return the steps that have timelines, ascending."""
        return numbered(self.path / TIMELINES)

    def timeline(self, step: int) -> Timeline:
        """Return when each rank's actions ran in a step. Raise ArgumentError if that was not recorded."""
        file = self.path / TIMELINES / f"{step}.json"
        if not file.exists():
            there = ", ".join(map(str, self.traced_steps()[-8:])) or "none yet"
            raise ArgumentError(f"run {str(self.path)!r} has no timeline of step {step}; there are: {there}")
        what = f"timeline {str(file)!r}"
        return Timeline.from_dict(read_json(file, what), what)

    def timelines(self) -> tuple[dict[int, Timeline], list[str]]:
        """Return all timelines, by step, and a sentence for each that is damaged, as by a copy cut short."""
        found: dict[int, Timeline] = {}
        damaged = []
        for step in self.traced_steps():
            try:
                found[step] = self.timeline(step)
            except ArgumentError as error:
                damaged.append(f"step {step} is left out: {error}")
        return found, damaged

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
        what = f"prediction {str(file)!r}"
        given = validate(dict[str, Any], read_json(file, what), what)
        return RecordedPrediction(
            validate(str, given.get("source"), f"{what}: source"),
            validate(float, given.get("step_seconds"), f"{what}: step_seconds"),
            validate(tuple[float, ...], given.get("stage_seconds"), f"{what}: stage_seconds"),
            Timeline.from_dict(given.get("timeline"), what),
        )

    def memory(self, step: int) -> tuple[MemoryTrace, ...]:
        """Return the memory of ranks in a step that has a timeline, of those for which it is known: as measured, or
        else as predicted."""
        lengths = [len(track) for track in self.timeline(step).tracks]
        predicted = json_or_none(self.path / PREDICTED_MEMORY)
        found = []
        for rank, length in enumerate(lengths):
            measured = json_or_none(self.path / MEMORY / f"{step}.{rank}.json")
            if _fits(measured, length):
                found.append(MemoryTrace(rank, tuple(measured), True))
            elif isinstance(predicted, list) and len(predicted) == len(lengths) and _fits(predicted[rank], length):
                found.append(MemoryTrace(rank, tuple(predicted[rank]), False))
        return tuple(found)

    def ranks(self) -> list[RankState]:
        """Return what every process does, by number: as it reports itself, or as relayed by process 0 if it writes
        elsewhere."""
        return self.ranks_and_damage()[0]

    def ranks_and_damage(self) -> tuple[list[RankState], list[str]]:
        """Return the states of `ranks`, and a sentence for each damaged file."""
        states: dict[int, RankState] = {}
        damaged = []
        for number in numbered(self.path / RANKS):
            file = self.path / RANKS / f"{number}.json"
            what = f"state {str(file)!r}"
            try:
                given = read_json(file, what)
                if not isinstance(given, dict) or given.get("run") != self.about.id:
                    continue  # of another run in this folder
                own = RankState.from_dict(given.get("state"), given.get("at"), what)
                heard = validate(tuple[dict[str, Any], ...], given.get("heard", ()), f"{what}: heard")
                others = [RankState.from_dict(one, given.get("at"), what) for one in heard]
            except ArgumentError as error:
                damaged.append(str(error))
                continue
            states = {other.number: replace(other, heard=True) for other in others} | states | {own.number: own}
        return [states[number] for number in sorted(states)], damaged


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has a run of penstock in it, of any version."""
    given = json_or_none(Path(path) / ABOUT)
    return isinstance(given, dict) and given.get("format") == FORMAT


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Read the run in a folder. Raise ArgumentError if there is none, or if another version or another tool wrote
    it."""
    folder = Path(path)
    what = f"run {os.fspath(path)!r}"
    how = "a training script records one with penstock.pipeline(..., run_dir='runs/NAME')"
    if not folder.is_dir():
        raise ArgumentError(f"{what}: {'this is a file, not a folder' if folder.exists() else 'no such folder'}; {how}")
    if not (folder / ABOUT).exists():
        inside = sorted(one.parent.name for one in folder.glob(f"*/{ABOUT}"))[:4]
        hint = f"it has runs in it: {', '.join(inside)}" if inside else how
        raise ArgumentError(f"{what}: there is no {ABOUT} in this folder; {hint}")
    return RecordedRun(folder, RunInfo.from_dict(read_json(folder / ABOUT, what), what))


def joined(steps: list[StepRecord], added: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps by number, with those added that come after them, in place. A step that is not greater than those before
    it takes their place: the run was resumed there."""
    for one in added:
        while steps and steps[-1].step >= one.step:
            steps.pop()
        steps.append(one)
    return steps


def _fits(given: Any, length: int) -> bool:
    is_list = isinstance(given, list) and len(given) == length
    return is_list and all(type(one) is int and 0 <= one < 1 << 63 for one in given)

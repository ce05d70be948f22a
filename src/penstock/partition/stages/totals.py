"""What the stages of a cut recording come to: work, and calls of modules that draw."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import CutRecording


def work_of_stages(recording: Recording, split: CutRecording) -> tuple[int, ...]:
    """Each stage's work; see `work_of`."""
    work = [0] * split.count
    for fact in recording.facts.values():
        work[split.stage_of(fact.index)] += fact.work
    return tuple(work)


def draw_offsets(recording: Recording, starts: Sequence[int]) -> tuple[dict[str, int], ...]:
    """For each stage, how often each drawing module is called on the stages before it."""
    return tuple({name: bisect_left(calls, start) for name, calls in recording.calls.items()} for start in (0, *starts))

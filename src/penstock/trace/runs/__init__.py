"""The folder that a training run leaves: what it is, each step, timelines, memory, and the current state of each rank.

`penstock.pipeline(..., run_dir="runs/gpt")` writes one; readers use this package:

    from penstock.trace.runs import is_run, read_run

    run = read_run("runs/gpt")          # ArgumentError: there is none, or another version or tool wrote it
    run.about                           # RunInfo: model, devices, ranks, schedule, placement, cuts, memory limit
    run.steps()                         # [StepRecord(step, loss, seconds, rows, at_seconds, bubble)], from step 1 on
    lines, offset = run.steps_after(0)  # only what was added since; pass `offset` the next time
    run.traced_steps()                  # [5, 50, 100]: the steps whose timelines are there
    run.timeline(50)                    # a schedule.timeline.Timeline, all ranks
    run.schedule(50)                    # the Schedule that this step ran, communication included
    run.memory(50)                      # (MemoryTrace(rank, bytes, measured),): after each action of the track
    run.predicted()                     # RecordedPrediction(step_seconds, timeline), or None
    run.ranks()                         # [RankState], every rank of every replica: its action, its memory, how fresh

The files, all text:

    run.json            `RunInfo`: what does not change
    predicted.json      the prediction of a plan or a profile for a step, and its timeline
    steps.jsonl         a line for each step: step, loss, seconds, rows, at_seconds, bubble (null where not known)
    timelines/50.json   `Timeline.to_dict` of that step
    memory/             memory after each action: 50.0.json is what rank 0's device had allocated in step 50;
                        predicted.json what the schedule and the stages' bytes say, for ranks without such a device
    ranks/0.json        what process 0 does: written several times a second while it lives, and once at its end
    earlier/1/          what an earlier run left in this folder, if a new one began here
    .owner.json         the process that writes here, while it does: see `penstock._base.owner`

Every file but steps.jsonl is replaced as a whole, so that no reader sees a half of one; a line of steps.jsonl that has
no end yet is left out. A run that is resumed appends to its folder. If a step ran twice, the later
record wins.

Plain values and files: no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._base.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.trace.runs.about import RunInfo as RunInfo
    from penstock.trace.runs.option import RunConfig as RunConfig
    from penstock.trace.runs.reader import MemoryTrace as MemoryTrace
    from penstock.trace.runs.reader import RecordedPrediction as RecordedPrediction
    from penstock.trace.runs.reader import RecordedRun as RecordedRun
    from penstock.trace.runs.reader import is_run as is_run
    from penstock.trace.runs.reader import read_run as read_run
    from penstock.trace.runs.records import RankState as RankState
    from penstock.trace.runs.records import StepRecord as StepRecord

_HOMES = {
    "about": "RunInfo",
    "reader": "MemoryTrace RecordedPrediction RecordedRun is_run read_run",
    "records": "RankState StepRecord",
    "option": "RunConfig",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES)

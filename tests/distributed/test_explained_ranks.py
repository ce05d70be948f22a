"""What is planted in a real run is named: by the runtime's own timeline, read as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import explain_jobs
import pytest

from penstock._base.errors import ArgumentError
from penstock.plan.explain import Explanation, explain, load_trace, steps_of_trace
from penstock.report.web.sources import load_contents
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

SECONDS = 0.004
"""What a block's forward takes: far more than the runtime does around it."""


def explained(ranks: Ranks, folder: Path, *planted: object) -> Explanation:
    timelines = ranks.run(explain_jobs.traced, *planted)[0]
    (folder / "timeline.json").write_text(json.dumps(timelines))
    return explain(load_trace([folder]))


def test_a_stage_with_slow_forwards_is_named_and_its_rank_is_not_blamed(ranks3: Ranks, tmp_path: Path) -> None:
    found = explained(ranks3, tmp_path, [SECONDS] * 3, ["1", "2"], 1, 3 * SECONDS)
    (cut,) = [change for change in found.changes if change.kind == "cut"]
    assert cut.text.startswith("stage 1 takes 1.")
    assert cut.gain > 0.1
    assert not any("is slow" in change.text for change in found.changes)
    assert len(found.run.steps) == 5
    assert found.step.slowest.schedule.name == "1f1b"


TORCH = {"ScheduleGPipe": (2, "gpipe"), "ScheduleInterleaved1F1B": (4, "interleaved-1f1b")}


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", pytest.param("ScheduleInterleaved1F1B", marks=pytest.mark.long)])
def test_traces_of_torchs_own_pipelines_are_read(ranks2: Ranks, tmp_path: Path, schedule: str) -> None:
    stages, name = TORCH[schedule]
    ranks2.run(explain_jobs.traced_by_torch, schedule, str(tmp_path))
    run = steps_of_trace(load_trace([tmp_path]))
    assert len(run.steps) == 2
    for step in run.steps:
        order = step.slowest.schedule
        assert (order.name, order.ranks, order.placement.depth, order.microbatches) == (name, 2, stages, 4)
    assert explain(load_trace([tmp_path])).step.seconds > 0
    assert load_contents([tmp_path]).title.startswith(f"{name}: 2 ranks, 4 microbatches"), "a report can be made of it"


@pytest.mark.long
def test_torchs_1f1b_marks_nothing_and_says_so(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(explain_jobs.traced_by_torch, "Schedule1F1B", str(tmp_path))
    with pytest.raises(ArgumentError, match=r"Schedule1F1B of torch\.distributed\.pipelining marks none"):
        load_trace([tmp_path])

"""What is planted in a real run is named: by the runtime's own timeline, read as a user would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock._base.errors import ArgumentError
from penstock.plan.explain import Explanation, explain, load_trace, steps_of_trace
from penstock.report.web.sources import load_contents
from penstock.runtime.step.results import StepResult
from scaffolding.ranks import Ranks
from scaffolding.sleeping import SleepingBlock

pytestmark = pytest.mark.distributed


MICROBATCHES = 8


def traced(
    rank: int, seconds: Sequence[float], cuts: Sequence[str], slow_rank: int = -1, extra: float = 0.0
) -> list[dict[str, Any]]:
    """The timelines of five steps of a model with such blocks, after one for warming up. Their median is quiet."""
    torch.manual_seed(0)
    here = extra if dist.get_rank() == slow_rank else 0.0
    model = nn.Sequential(*(SleepingBlock(one, here) for one in seconds))
    x = torch.randn(MICROBATCHES, 4)
    leaves = [str(place) for place in range(len(seconds))]
    found: list[StepResult] = []
    with penstock.pipeline(
        model, (x,), loss=nn.functional.mse_loss, microbatches=MICROBATCHES, cuts=list(cuts), leaf_modules=leaves
    ) as pipe:
        for _ in range(6):
            found.append(pipe.step(x, target=x, timeline=True))
        return [one.timeline.to_dict() for one in found[1:] if one.timeline is not None]


def traced_by_torch(rank: int, schedule: str, folder: str) -> None:
    """Steps of torch's own pipelines under its profiler, whose files of each rank go into the folder."""
    from torch.distributed import pipelining
    from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    torch.manual_seed(0)
    count = 4 if schedule == "ScheduleInterleaved1F1B" else 2
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(count)]
    stages = [
        pipelining.PipelineStage(layers[stage], stage, count, torch.device("cpu")) for stage in range(rank, count, 2)
    ]
    x, y = torch.randn(64, 256), torch.randn(64, 256)
    made = getattr(pipelining, schedule)(stages if count > 2 else stages[0], 4, nn.functional.mse_loss)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        on_trace_ready=tensorboard_trace_handler(folder, worker_name=f"rank{rank}"),
    ) as profiler:
        for _ in range(4):
            made.step(*([x] if rank == 0 else []), **({"target": y} if rank == 1 else {}))
            profiler.step()


SECONDS = 0.004
"""What a block's forward takes: far more than the runtime does around it."""


def explained(ranks: Ranks, folder: Path, *planted: object) -> Explanation:
    timelines = ranks.run(traced, *planted)[0]
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
    ranks2.run(traced_by_torch, schedule, str(tmp_path))
    run = steps_of_trace(load_trace([tmp_path]))
    assert len(run.steps) == 2
    for step in run.steps:
        order = step.slowest.schedule
        assert (order.name, order.ranks, order.placement.depth, order.microbatches) == (name, 2, stages, 4)
    assert explain(load_trace([tmp_path])).step.seconds > 0
    assert load_contents([tmp_path]).title.startswith(f"{name}: 2 ranks, 4 microbatches"), "a report can be made of it"


@pytest.mark.long
def test_torchs_1f1b_marks_nothing_and_says_so(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(traced_by_torch, "Schedule1F1B", str(tmp_path))
    with pytest.raises(ArgumentError, match=r"Schedule1F1B of torch\.distributed\.pipelining marks none"):
        load_trace([tmp_path])

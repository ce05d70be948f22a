"""Runs that real processes record: together, on hosts that do not share a folder, with replicas; and what is read."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_jobs import mesh_of
from torch import Tensor, nn

import penstock
from penstock._base.errors import ArgumentError
from penstock.plan.explain import explain, load_trace, steps_of_trace
from penstock.report.web.sources import load_contents
from penstock.runtime.step.results import StepResult
from penstock.trace.runs import RunConfig, read_run
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.sleeping import SleepingBlock

pytestmark = pytest.mark.distributed


X = torch.linspace(-1, 1, 64).view(8, 8)


def pipe_of(run: Any, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return penstock.pipeline(model, (X,), microbatches=2, run_dir=run, **{"loss_fn": nn.functional.mse_loss, **options})


def trained(rank: int, folders: Sequence[str], steps: int, replicas: int = 1) -> list[float]:
    """Trains with a folder for each rank; returns the losses."""
    mesh = mesh_of((replicas, len(folders) // replicas), ("dp", "pp")) if replicas > 1 else None
    with pipe_of(RunConfig(folders[rank], total_steps=100), mesh=mesh) as pipe:
        return [float(pipe.step(X, target=X).loss) for _ in range(steps)]


def looked_at(rank: int, folder: str) -> list[dict[str, Any]]:
    """What the last stage's loss finds in the folder of a run, once rank 0 waits for it."""
    found: list[dict[str, Any]] = []

    def looks(output: Tensor, target: Tensor) -> Tensor:
        until = time.monotonic() + 30
        while rank == 1 and pipe.step_count == 1 and not found and time.monotonic() < until:
            states = read_run(folder).ranks()
            waits = [bool(one.waits_for) for one in states]  # each rank writes its own file now and then
            if [(one.step, bool(one.action)) for one in states] == [(2, True)] * 2 and waits == [True, False]:
                found.extend(state.to_dict() for state in states)
            time.sleep(0.05)
        return nn.functional.mse_loss(output, target)

    with pipe_of(folder, loss_fn=looks) as pipe:
        for _ in range(2):
            pipe.step(X, target=X)
    return found


def refused(rank: int, folder: str, on: tuple[int, ...]) -> str:
    """What a pipeline says that is to record on these ranks."""
    return refusal_of(pipe_of, folder if rank in on else None)


def test_each_rank_writes_its_part(ranks2: Ranks, tmp_path: Path) -> None:
    losses = ranks2.run(trained, [str(tmp_path)] * 2, 6)
    run = read_run(tmp_path)
    assert (run.about.ranks, run.about.processes, run.about.total_steps) == (2, 2, 100)
    assert [step.loss for step in run.steps()] == losses[0] == losses[1]
    assert [step.bubble is None for step in run.steps()] == [True] * 4 + [False, True]
    timeline = run.timeline(5)
    assert not timeline.serialized
    assert all(len(track) for track in timeline.tracks)
    states = run.ranks()
    assert [(one.number, one.ranks, one.step, one.ended, one.heard) for one in states] == [
        (0, (0,), 6, True, False),
        (1, (1,), 6, True, False),
    ]
    assert states[0].pid != states[1].pid


def test_a_rank_is_seen_where_it_waits(ranks2: Ranks, tmp_path: Path) -> None:
    _, (first, last) = ranks2.run(looked_at, str(tmp_path))
    assert (first["action"][1:7], first["waits_for"], first["step"]) == ("RECV_B", (1,), 2)
    assert (last["action"], last["waits_for"], last["step"]) == ("1F0", (), 2)


@pytest.mark.long
def test_hosts_that_do_not_share_the_folder_are_heard_of(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(trained, [str(tmp_path / "here"), str(tmp_path / "there")], 6)
    run = read_run(tmp_path / "here")
    assert [(one.number, one.heard) for one in run.ranks()] == [(0, False), (1, True)]
    assert run.timeline(5).ranks == 2
    assert not (tmp_path / "there").exists()


@pytest.mark.long
def test_replicas_record_one_run(ranks4: Ranks, tmp_path: Path) -> None:
    losses = ranks4.run(trained, [str(tmp_path)] * 4, 6, 2)
    run = read_run(tmp_path)
    assert (run.about.ranks, run.about.replicas, run.about.processes, run.about.rows) == (2, 2, 4, 16)
    assert [step.loss for step in run.steps()] == losses[0]
    assert run.steps()[0].rows == 16
    assert [(one.replica, one.ranks) for one in run.ranks()] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]


def test_of_two_jobs_that_start_at_once_one_is_refused_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    with pipe_of(str(tmp_path), ranks=2) as pipe:
        said = ranks2.run(refused, str(tmp_path), (0, 1))
        assert said[0] == said[1]
        owner = f"process {os.getpid()} on {socket.gethostname()}, started at 20"
        assert said[0].startswith(f"ArgumentError: run_dir='{tmp_path}': {owner}")
        pipe.step(X, target=X)
    ranks2.run(trained, [str(tmp_path)] * 2, 2)
    assert len(read_run(tmp_path).steps()) == 2
    assert not (tmp_path / ".owner.json").exists()


@pytest.mark.long
def test_all_processes_record_or_none(ranks2: Ranks, tmp_path: Path) -> None:
    said = ranks2.run(refused, str(tmp_path), (0,))
    assert ["run_dir= is given on some processes only" in text for text in said] == [True, True]
    assert not [*tmp_path.iterdir()]


# -- what is planted in a run is named, read as a user would ----------------------------------------------------------


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


SECONDS = 0.01
"""What a block's forward takes: far more than the runtime does around it."""


def test_a_stage_with_slow_forwards_is_named_and_its_rank_is_not_blamed(ranks3: Ranks, tmp_path: Path) -> None:
    timelines = ranks3.run(traced, [SECONDS] * 3, ["1", "2"], 1, 3 * SECONDS)[0]
    (tmp_path / "timeline.json").write_text(json.dumps(timelines))
    found = explain(load_trace([tmp_path]))
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

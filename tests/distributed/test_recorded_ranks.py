"""Runs that real processes record: together, on hosts that do not share a folder, and with replicas."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_jobs import mesh_of
from torch import Tensor, nn

import penstock
from penstock.trace.runs import RunConfig, read_run
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of

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

"""Runs that real processes record: together, on hosts that do not share a folder, and with replicas."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import recorder_jobs

from penstock.trace.runs import read_run
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


def test_each_rank_writes_its_part(ranks2: Ranks, tmp_path: Path) -> None:
    losses = ranks2.run(recorder_jobs.trained, [str(tmp_path)] * 2, 6)
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
    _, (first, last) = ranks2.run(recorder_jobs.looked_at, str(tmp_path))
    assert (first["action"][1:7], first["waits_for"], first["step"]) == ("RECV_B", (1,), 2)
    assert (last["action"], last["waits_for"], last["step"]) == ("1F0", (), 2)


@pytest.mark.long
def test_hosts_that_do_not_share_the_folder_are_heard_of(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(recorder_jobs.trained, [str(tmp_path / "here"), str(tmp_path / "there")], 6)
    run = read_run(tmp_path / "here")
    assert [(one.number, one.heard) for one in run.ranks()] == [(0, False), (1, True)]
    assert run.timeline(5).ranks == 2
    assert not (tmp_path / "there").exists()


@pytest.mark.long
def test_replicas_record_one_run(ranks4: Ranks, tmp_path: Path) -> None:
    losses = ranks4.run(recorder_jobs.trained, [str(tmp_path)] * 4, 6, 2)
    run = read_run(tmp_path)
    assert (run.about.ranks, run.about.replicas, run.about.processes, run.about.rows) == (2, 2, 4, 16)
    assert [step.loss for step in run.steps()] == losses[0]
    assert run.steps()[0].rows == 16
    assert [(one.replica, one.ranks) for one in run.ranks()] == [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]


def test_of_two_jobs_that_start_at_once_one_is_refused_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    with recorder_jobs.pipe_of(str(tmp_path), ranks=2) as pipe:
        said = ranks2.run(recorder_jobs.refused, str(tmp_path))
        assert said[0] == said[1]
        owner = f"process {os.getpid()} on {socket.gethostname()}, started at 20"
        assert said[0].startswith(f"ArgumentError: run_dir='{tmp_path}': {owner}")
        pipe.step(recorder_jobs.X, target=recorder_jobs.X)
    ranks2.run(recorder_jobs.trained, [str(tmp_path)] * 2, 2)
    assert len(read_run(tmp_path).steps()) == 2
    assert not (tmp_path / ".owner.json").exists()


@pytest.mark.long
def test_all_processes_record_or_none(ranks2: Ranks, tmp_path: Path) -> None:
    said = ranks2.run(recorder_jobs.refused_on_one, str(tmp_path))
    assert ["run_dir= is given on some processes only" in text for text in said] == [True, True]
    assert not [*tmp_path.iterdir()]

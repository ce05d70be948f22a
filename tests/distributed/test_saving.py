"""Saves that go on beside the training, that fail, or that are cut off; what is refused, on every rank."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest
import saving_jobs as jobs
import torch

from penstock import CheckpointError, checkpoint
from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

WRONG = {
    "keep": "ArgumentError: keep_last=0: expected an integer >= 1",
    "a foreign parameter": "optimizer: group 0 has a parameter of shape (3,) that is not one of the pipeline's",
    "more groups": "ArgumentError: optimizer: 1 groups of parameters on rank 0, but 2 groups of parameters on rank 1",
    "no optimizer": "ArgumentError: optimizer: 1 groups of parameters on rank 0, but no optimizer on rank 1",
    "others cannot": "CheckpointError: cannot save: KeyError: 'not there' (rank 0)",
    "no folder": "/file: FileExistsError: File exists (rank 0)",
    "flat": "stateful['flat']: its tensors differ between rank 0 and rank 1",
    "wrapped": "stateful['wrapped']: its tensors differ",
    "container": "optimizer: Container.state_dict() has other entries than a state for each parameter",
    "no such optimizer": "optimizer[1] is str: expected an optimizer, or in stateful=",
    "no such object": "stateful['decay'] is float: expected an optimizer, or in stateful= an object with state_dict",
    "not in others": "ArgumentError: stateful['two'] is not in ",
    "another kind": "has the state of AdamW, but the optimizer is SGD; make the same kind",
    "another group": "was in group 0 of the optimizer's groups, and is in none now",
    "other groups": "has 1 groups of parameters, but the optimizer 2",
    "a name": "ArgumentError: there is no complete checkpoint ",
    "no state": "has no optimizer",
    "several optimizers": "which has optimizer['adam']; load it without",
    "no averages": "stateful['ema']: others['ema']/",
    "other averages": "stateful['ema']: others['ema']/",
    "another model": "was saved from another model: it lacks",
    "cut off": "is shorter than stated",
    "a file that is gone": "cannot be loaded: it lacks __1_0.distcp",
}


def test_what_is_wrong_is_refused_on_every_rank_and_changes_nothing(ranks2: Ranks, tmp_path: Path) -> None:
    every = ranks2.run(jobs.refused_everywhere, tmp_path)
    assert every[0].keys() == WRONG.keys()
    for name, part in WRONG.items():
        texts = {said[name][0] for said in every}
        assert len(texts) == 1, texts
        assert part in texts.pop(), name
        if name != "cut off":  # only reading could find it out
            assert all(said[name][1] for said in every), name


def test_trap_25_training_goes_on_while_a_copy_is_written(ranks2: Ranks, tmp_path: Path) -> None:
    for names, losses, again in ranks2.run(jobs.save_while_training, tmp_path):
        assert names == ["step-00000001", "step-00000003"]
        assert losses == again


def test_what_fails_in_the_background_is_told_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    every = ranks2.run(jobs.fail_in_the_background, tmp_path)
    assert every[0] == every[1]
    told = "CheckpointError: cannot write {}/step-{:08d}: OSError: No space left on device (rank 1)"
    assert every[0] == [told.format(tmp_path, n) for n in (2, 3, 4, 2)]


def test_a_second_job_is_refused_on_every_rank_until_the_first_has_ended(ranks2: Ranks, tmp_path: Path) -> None:
    with jobs.training(ranks=2) as (task, pipe, optimizer):
        for _ in range(2):
            jobs.step(task, pipe, optimizer)
            checkpoint.save(tmp_path, pipe, optimizer)
            first, second = ranks2.run(jobs.refused, tmp_path)
            assert first == second
            owner = f"process {os.getpid()} on {socket.gethostname()}, started at 20"
            assert first.startswith(f"ArgumentError: checkpoints in {tmp_path}: {owner}")
    assert ranks2.run(jobs.refused, tmp_path) == ["", ""]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_told_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    """torch says "unexpected pos 704 vs 598" then."""
    with jobs.training(ranks=2) as (task, pipe, optimizer):
        jobs.step(task, pipe, optimizer)
        checkpoint.save(tmp_path, pipe, optimizer)
        jobs.step(task, pipe, optimizer)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (7000, limits[1]))
        try:
            with pytest.raises(CheckpointError) as told:  # noqa: PT012  (either may raise)
                checkpoint.save(tmp_path, pipe, optimizer, blocking=False)
                checkpoint.wait_for_save(pipe)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(told.value) == f"cannot write {tmp_path}/step-00000002: OSError: File too large (rank 0)"
        assert sorted(os.listdir(tmp_path)) == [".owner.json", "step-00000001"]
        jobs.step(task, pipe, optimizer)
        checkpoint.save(tmp_path, pipe, optimizer, blocking=False)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"


def test_a_kill_in_the_middle_leaves_the_last_good_one(ranks2: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="its process ended with -9"):
        ranks2.run(jobs.die_while_saving, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    assert ranks2.run(jobs.go_on, tmp_path) == [(1, (tmp_path / "loss").read_text())] * 2
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.parametrize(("name", "sharded"), long_after(1, ("mlp", True), ("tied_gpt", False)))
def test_a_mesh_writes_one_checkpoint_of_whole_tensors(ranks4: Ranks, tmp_path: Path, name: str, sharded: bool) -> None:
    every = ranks4.run(jobs.save_on_a_mesh, tmp_path, name, sharded)
    alone = jobs.load_alone(tmp_path, name)
    assert {name for part in every for name in part} == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for part in every for name, tensor in part.items())

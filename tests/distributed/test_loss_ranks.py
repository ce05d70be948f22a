"""Parameters of the loss train as in plain torch: wherever the last stage is, clipped, saved, and under replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loss_jobs as jobs
import pytest
import torch
from safetensors.torch import load_file

from scaffolding.ranks import Ranks
from scaffolding.small import mlp

pytestmark = pytest.mark.distributed

OWN = {"loss.temperature", "loss.centers.weight", "loss.seen"}


def same(every: list[jobs.Trained], expected: jobs.Trained, *, exactly: bool = True) -> None:
    held = {name: tensor for each in every for name, tensor in each.state.items()}
    assert held.keys() == expected.state.keys()
    pairs = [(held[name], tensor) for name, tensor in expected.state.items() if exactly or name != "loss.seen"]
    for each in every:
        pairs += [*zip(each.losses, expected.losses, strict=True), *zip(each.norms, expected.norms, strict=True)]
    for mine, other in pairs:
        if exactly:
            assert torch.equal(mine, other)
        else:
            torch.testing.assert_close(mine, other)


def test_a_loss_with_parameters_trains_as_in_plain_torch() -> None:
    same([jobs.train(0, jobs.Centers, {"ranks": 3, "schedule": "zb-h1"})], jobs.by_hand())


def test_in_several_processes_the_last_stages_rank_holds_them(ranks2: Ranks) -> None:
    every = ranks2.run(jobs.train, jobs.Centers, {})
    assert [OWN & each.state.keys() for each in every] == [set(), OWN]
    same(every, jobs.by_hand())


def test_replicas_average_their_gradients(ranks4: Ranks) -> None:
    same(ranks4.run(partial(jobs.train, mesh=True), jobs.Centers, {}), jobs.by_hand(), exactly=False)


def test_two_copies_of_the_last_stage_add_their_gradients(ranks2: Ranks) -> None:
    every = ranks2.run(jobs.train, jobs.closure, {"schedule": "dualpipe"})
    assert all("loss.temperature" in each.state for each in every)
    alone = jobs.train(0, jobs.closure, {"ranks": 1})
    for each in every:
        torch.testing.assert_close(each.state, {name: alone.state[name] for name in each.state})


def test_checkpoints_have_them_and_files_of_the_model_do_not(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(partial(jobs.train, steps=1, folder=tmp_path), jobs.Centers, {})
    after = jobs.train(0, jobs.Centers, {"ranks": 1}, steps=2, folder=tmp_path, loads=True)
    expected = jobs.by_hand(3)
    assert all(torch.equal(after.state[name], tensor) for name, tensor in expected.state.items())
    mlp().load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(("make", "schedule", "mesh"), [(jobs.Centers, "1f1b", False), (jobs.closure, "1f1b", True)])
def test_verify_compares_them(make: Callable[[], Any], schedule: str, mesh: bool, ranks2: Ranks, ranks4: Ranks) -> None:
    for ok, summary, names in (ranks4 if mesh else ranks2).run(jobs.verify, make, schedule, mesh):
        assert ok, summary
        assert {*names} == (OWN if make is jobs.Centers else {"loss.temperature"})


@pytest.mark.parametrize(("schedule", "mesh"), [("dualpipe", False), ("1f1b", True)])
def test_parts_of_the_loss_are_on_every_rank(schedule: str, mesh: bool, ranks2: Ranks, ranks4: Ranks) -> None:
    x, y = jobs.data()
    output = mlp()(x).detach()
    trained = {"mean": float(output.mean()), "count": 3.0}
    evaluated = {**trained, "right": float((output.argmax(1) == y).float().mean())}
    for parts, _ in (ranks4 if mesh else ranks2).run(jobs.parts, schedule, mesh):
        for mine, expected in zip(parts, [evaluated, trained] * 2, strict=True):
            assert mine == pytest.approx(expected)

"""Packages that have moved can be imported under their old names until 0.2."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

import penstock
from penstock._base.lazy import moved, renamed

MOVED = {
    "penstock.balance": "penstock.costs",
    "penstock.blame": "penstock.verification.blame",
    "penstock.explain": "penstock.plan.explain",
    "penstock.explain.reading": "penstock.trace.formats",
    "penstock.fabric.alpha_beta": "penstock.network.fabric.alpha_beta",
    "penstock.fabric.emulation.signals": "penstock.network.fabric.emulation.trials",
    "penstock.errors": "penstock._base.errors",
    "penstock.integrations.tensorboard": "penstock.integrations.loggers",
    "penstock.launch.step_file": "penstock.distributed.launch.step_file",
}


def test_every_target_exists() -> None:
    assert [target for target in moved.values() if find_spec(target) is None] == []


@pytest.mark.parametrize("name", MOVED)
def test_a_package_that_has_moved_has_its_old_name(name: str) -> None:
    assert import_module(name) is import_module(MOVED[name])


def test_it_is_still_an_attribute_of_penstock() -> None:
    assert penstock.search is import_module("penstock.simulate.search")
    assert "search" in dir(penstock)


RENAMED = [*renamed.items()]


@pytest.mark.parametrize(("old", "new"), RENAMED, ids=[old for old, _ in RENAMED])
def test_a_name_of_before_is_accepted(old: str, new: str) -> None:
    package, _, name = old.rpartition(".")
    module = import_module(package)
    assert getattr(module, name) is getattr(module, new)


def test_attributes_and_arguments_of_before_are_accepted() -> None:
    from penstock.plan import Cluster
    from penstock.schedule import generate
    from penstock.trace.runs import RunConfig

    config = RunConfig("runs/x", steps=5)  # type: ignore[call-arg]
    assert (config.total_steps, config.steps) == (5, 5)  # type: ignore[attr-defined]
    assert Cluster.host_link is not None  # type: ignore[attr-defined]
    assert generate("gpipe", 2, 2, chunks=2) == generate("gpipe", 2, 2, stages_per_rank=2)  # type: ignore[call-arg]
    model, x = torch.nn.Linear(3, 3), torch.ones(4, 3)
    with penstock.pipeline(model, (x,), loss=torch.nn.functional.mse_loss, leaves=None, share_loss=True) as pipe:
        assert pipe.is_first is pipe.is_main_process is True
        assert pipe.gather(3) == [3]

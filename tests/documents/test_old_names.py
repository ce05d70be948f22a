"""Packages that have moved can be imported under their old names until 0.2."""

from __future__ import annotations

from importlib import import_module

import pytest

import penstock

MOVED = {
    "penstock.balance": "penstock.costs",
    "penstock.balance.profile": "penstock.costs.profile",
    "penstock.blame": "penstock.verification.blame",
    "penstock.explain": "penstock.plan.explain",
    "penstock.explain.reading": "penstock.trace.files",
    "penstock.fabric.alpha_beta": "penstock.network.fabric.alpha_beta",
    "penstock.fabric.emulation.signals": "penstock.network.fabric.emulation.trials",
    "penstock.fabric.forecast": "penstock.network.fabric.alpha_beta",
    "penstock.fabric.warmup": "penstock.network.fabric.statistics",
    "penstock.hardware": "penstock.costs.hardware",
    "penstock.errors": "penstock._base.errors",
    "penstock.integrations.tensorboard": "penstock.integrations.loggers",
    "penstock.launch.step_file": "penstock.distributed.launch.step_file",
    "penstock.runs": "penstock.trace.runs",
    "penstock.search": "penstock.simulate.search",
    "penstock.transformer": "penstock.plan.transformer",
}


@pytest.mark.parametrize("name", MOVED)
def test_a_package_that_has_moved_has_its_old_name(name: str) -> None:
    assert import_module(name) is import_module(MOVED[name])


def test_it_is_still_an_attribute_of_penstock() -> None:
    assert penstock.search is import_module("penstock.simulate.search")
    assert "search" in dir(penstock)

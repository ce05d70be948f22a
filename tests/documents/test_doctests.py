"""The examples in public docstrings give what they show."""

import doctest
from importlib import import_module

import pytest

EXAMPLES = {
    "penstock.costs": 5,
    "penstock.distributed": 3,
    "penstock.network.fabric": 2,
    "penstock.costs.hardware": 1,
    "penstock.network": 2,
    "penstock.partition": 4,
    "penstock.pipe": 4,
    "penstock.plan": 5,
    "penstock.verification": 5,
    "penstock.report": 3,
    "penstock.schedule": 3,
    "penstock.schedule.action": 1,
    "penstock.schedule.check": 3,
    "penstock.schedule.communication": 2,
    "penstock.schedule.csv": 2,
    "penstock.schedule.generators": 1,
    "penstock.schedule.grid": 2,
    "penstock.schedule.passes": 2,
    "penstock.schedule.schedule": 2,
    "penstock.simulate.search": 4,
    "penstock.simulate": 3,
    "penstock.simulate.simulator": 5,
    "penstock.plan.transformer": 1,
    "penstock.trace": 2,
}
"""How many lines of example each module has at least."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(import_module(name))
    assert failed == 0
    assert tried >= EXAMPLES[name]

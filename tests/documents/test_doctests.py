"""The examples in public docstrings give what they show."""

import doctest
from importlib import import_module

import pytest

EXAMPLES = {
    "penstock.costs": 4,
    "penstock.schedule.action": 1,
    "penstock.schedule.check": 3,
    "penstock.schedule.communication": 2,
    "penstock.schedule.csv": 2,
    "penstock.schedule.generators": 1,
    "penstock.schedule.grid": 2,
    "penstock.schedule.passes": 2,
    "penstock.schedule.schedule": 2,
    "penstock.simulate.simulator": 5,
}
"""How many lines of example each module has at least."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(import_module(name))
    assert failed == 0
    assert tried >= EXAMPLES[name]

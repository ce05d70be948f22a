"""A search takes as many steps as its seconds are worth. Here the clock does not cut off a machine that is busy."""

import importlib
import math

import pytest


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("penstock.search.search"), "_PATIENCE", math.inf)

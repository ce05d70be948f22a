"""What a report advises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.explain.changes import Change
from penstock.web.measured import improvements_of, nothing_better


def test_a_gain_within_the_simulators_error_is_no_advice() -> None:
    changes = (
        Change("rank", "rank 0 is slow", 0.965, 0.035, ""),
        Change("rank", "rank 1 is slow", 0.8, 0.2, ""),
        Change("link", "links twice as fast", 0.682, 0.318, ""),
    )
    found: Any = SimpleNamespace(changes=changes, change_error=0.116)
    assert [one.text for one in improvements_of(found)] == ["rank 1 is slow", "links twice as fast"]
    assert not nothing_better(found)


def test_a_report_says_that_nothing_brings_more_than_the_error() -> None:
    found: Any = SimpleNamespace(changes=(), change_error=0.116)
    assert "no change that was tried brings more than 11.6% of a step" in nothing_better(found)

"""What constraint programming proves, and that the heuristic search comes as far in small cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exact_search import exact
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Placement, check
from penstock.simulate import memory
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import search
from scaffolding.representatives import representatives

PUBLISHED = json.loads((Path(__file__).parents[2] / "scaffolding" / "published.json").read_text())
UNIT = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=1)
SMALL = [row for row in PUBLISHED["proven_optima"] if row["ranks"] == 2]
HARD = [row for row in SMALL if row["placement"] == "V" and row["memory_limit"] < 4]
"""Long: `test_exact_search.py` has each under one of the two objectives."""
EASY = [row for row in SMALL if row not in HARD]


@pytest.mark.parametrize(
    ("row", "objective"),
    [*representatives(2, EASY, ["makespan", "span"]), *representatives(0, HARD, ["makespan", "span"])],
    ids=lambda one: one if isinstance(one, str) else f"{one['placement']}-{one['memory_limit']}",
)
def test_small_cases_are_proven(row: dict[str, Any], objective: Any) -> None:
    placement = Placement.loop(2) if row["placement"] == "v1" else Placement.v(2)
    found = exact(placement, row["microbatches"], UNIT, memory_limit=row["memory_limit"], objective=objective)
    assert found.proven
    assert found.objective_seconds == row[objective]
    assert not [violation for violation in check(found.schedule) if violation.fatal]
    assert max(one.peak_activations for one in memory(found.schedule, UNIT, found.timeline)) <= row["memory_limit"]


@settings(max_examples=5, derandomize=True)  # that it is the best is no law
@given(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=2, max_size=3), st.integers(2, 3), st.integers(0, 2))
def test_the_search_is_as_good_and_no_bound_is_above(costs: list[tuple[int, int, int]], m: int, c: int) -> None:
    stages = [StageCost(*cost, activation_bytes=1, weight_gradient_bytes=1) for cost in costs]
    placement, link = Placement.loop(len(stages)), LinkCost(c)
    proven = exact(placement, m, stages, link, memory_limit=2, seconds=10)
    found = search(placement, m, stages, link, memory_limit=2, seconds=2)
    assert proven.proven
    assert found.lower_bound_seconds <= proven.objective_seconds * (1 + 1e-9)
    assert found.objective_seconds == proven.objective_seconds


@pytest.mark.parametrize(("held", "kept"), [(21, 9), (1 / 3, 1 / 7)])
def test_proofs_do_not_depend_on_the_unit_of_memory(held: float, kept: float) -> None:
    """No number of 1/7s is a whole number of anything: rounded up, four of them did not fit where they do."""
    seconds = ((4, 3, 2), (1, 4, 4), (1, 0, 0))
    costs = [StageCost(*three, activation_bytes=held, weight_gradient_bytes=kept) for three in seconds]
    found = exact(Placement(2, (0, 1, 0)), 3, costs, memory_limit=4 * held, seconds=10)
    assert found.objective_seconds == 32
    assert found.proven

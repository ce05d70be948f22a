"""The exact search, and what it proves of the other one and of the lower bound."""

from __future__ import annotations

import pytest
from exact_search import exact
from hypothesis import given, settings
from hypothesis import strategies as st
from some_costs import some_costs

from penstock.schedule import Placement, check
from penstock.simulate import memory
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import Objective, lower_bound, problem, search

UNIT = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=1)
PLACEMENTS = [Placement.loop(2), Placement.loop(3), Placement.v(2), Placement.loop(2, 2)]

Question = tuple[Placement, int, list[StageCost], LinkCost]


@st.composite
def questions(draw: st.DrawFn) -> tuple[Question, float, Objective]:
    """Small ones, with stages that differ in time and memory, and little room: the bound alone proves few of them."""
    placement = draw(st.sampled_from(PLACEMENTS))
    costs = draw(some_costs(placement.stages, most=5))
    least = max(sum(costs[s].activation_bytes for s in placement.stages_on(r)) for r in range(placement.ranks))
    question = placement, draw(st.integers(2, 4)), costs, LinkCost(draw(st.integers(0, 2)))
    return question, least + draw(st.integers(0, 2)), draw(st.sampled_from(["makespan", "span"]))


@settings(max_examples=25, derandomize=True)  # how close a heuristic comes is no law
@given(questions())
def test_heuristic_is_close_to_what_is_proven_and_the_bound_is_below(
    drawn: tuple[Question, float, Objective],
) -> None:
    question, limit, objective = drawn
    proven = exact(*question, memory_limit=limit, objective=objective, seconds=3)
    assert not check(proven.schedule)
    held = memory(proven.schedule, question[2], proven.timeline)
    assert max(one.peak_activations for one in held) <= limit
    found = search(*question, memory_limit=limit, objective=objective, seconds=0.3)
    bound = lower_bound(problem(*question, memory_limit=limit, objective=objective))
    assert bound <= proven.objective_seconds * (1 + 1e-9)
    assert proven.lower_bound_seconds <= found.objective_seconds * (1 + 1e-9)
    if proven.proven:
        assert found.objective_seconds <= proven.objective_seconds * 1.06


@pytest.mark.parametrize(
    ("placement", "limit", "objective", "least"),
    [
        (Placement.loop(3), 2, "makespan", 25),
        (Placement.v(2), 2, "makespan", 33),
        (Placement.v(2), 3, "span", 27),
    ],
)
def test_proves_what_the_bound_does_not(placement: Placement, limit: int, objective: Objective, least: int) -> None:
    microbatches = 2 * placement.ranks
    proven = exact(placement, microbatches, UNIT, memory_limit=limit, objective=objective, seconds=300)
    assert proven.proven
    assert proven.objective_seconds == proven.lower_bound_seconds == least
    assert lower_bound(problem(placement, microbatches, UNIT, memory_limit=limit, objective=objective)) < least


def test_times_that_are_no_whole_numbers() -> None:
    costs = [StageCost(0.1, 0.3, 0.2), StageCost(1 / 3, 0.25, 2**0.5)]
    proven = exact(Placement.loop(2), 3, costs, LinkCost(0.01), memory_limit=2, seconds=300)
    assert proven.proven
    found = search(Placement.loop(2), 3, costs, LinkCost(0.01), memory_limit=2, seconds=1)
    assert found.objective_seconds == pytest.approx(proven.objective_seconds)

"""The search is at least as good as what was published, and as every generator that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.schedule import Placement, check, generate, schedule_specs
from penstock.schedule.generators import ScheduleParams
from penstock.simulate import memory, simulate
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import search

PUBLISHED = json.loads((Path(__file__).parents[2] / "scaffolding" / "published.json").read_text())
ROUNDING = 0.5e-4
UNIT = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=1)

OPTIMA = [
    (row, objective)
    for row in PUBLISHED["proven_optima"]
    for objective in ("makespan", "span")
    if row[objective] is not None
]


LONG = [
    (3, "v1", 2),
    *((4, placement, limit) for placement in ("v1", "V") for limit in (5, 6)),
    (2, "V", 2),
    (2, "V", 3),
]
"""Ranks, placements and limits of the rows that take long; others have as many ranks, or the same placement."""


def is_long(row: dict[str, Any], objective: str) -> bool:
    """Of the others, each is asked for one of the two, in turn; without a span, for the makespan."""
    turn = ("makespan", "span")[row["memory_limit"] % 2]
    key = (row["ranks"], row["placement"], row["memory_limit"])
    return key in LONG or (row["span"] is not None and objective != turn)


@pytest.mark.parametrize(
    ("row", "objective"),
    [pytest.param(r, o, marks=pytest.mark.long if is_long(r, o) else ()) for r, o in OPTIMA],
    ids=[f"p{r['ranks']}-{r['placement']}-{r['memory_limit']}-{o}" for r, o in OPTIMA],
)
def test_proven_optima(row: dict[str, Any], objective: Any) -> None:
    placement = Placement.loop(row["ranks"]) if row["placement"] == "v1" else Placement.v(row["ranks"])
    limit = row["memory_limit"]
    seconds = 30 if (row["ranks"], limit) == (4, 5) else 1  # the one that takes long
    found = search(placement, row["microbatches"], UNIT, memory_limit=limit, objective=objective, seconds=seconds)
    assert found.objective_seconds == row[objective]
    assert found.lower_bound_seconds <= row[objective]
    assert max(m.peak_activations for m in memory(found.schedule, UNIT, found.timeline)) <= limit


SHORT = [("1.5B", 32), ("14.6B", 64)]
"""One for each number of ranks."""


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if (row["model"], row["microbatches"]) in SHORT else pytest.mark.long)
        for row in PUBLISHED["tables5and6"]
    ],
    ids=lambda row: f"{row['model']}-m{row['microbatches']}",
)
def test_the_search_begins_with_the_published_heuristics(row: dict[str, Any], name: str) -> None:
    """However little time it has, but for one of these, which takes a search."""
    f, i, w = (row[what] for what in ("forward", "backward_input", "backward_weight"))
    cost = StageCost(f, i, w, activation_bytes=row["mem_forward"], weight_gradient_bytes=row["mem_weight"])
    limit = (1 if name == "zb-1p" else 2) * row["ranks"] * row["mem_forward"]
    place, link = Placement.loop(row["ranks"]), LinkCost(row["comm"])
    seconds = 1 if (row["microbatches"], name) == (24, "zb-2p") else 0.001
    found = search(place, row["microbatches"], cost, link, memory_limit=limit, objective="span", seconds=seconds)
    work = row["microbatches"] * (f + i + w)
    assert 1 - work / found.objective_seconds <= row["bubble_rate"][name] + ROUNDING
    assert max(m.peak_activations for m in memory(found.schedule, cost, found.timeline)) <= limit


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", PUBLISHED["zbv_sweep"], ids=lambda row: f"m{row['microbatches']}")
def test_zb_v(row: dict[str, Any]) -> None:
    f, i, w = (row[f"chunk_{what}"] for what in ("forward", "backward_input", "backward_weight"))
    p, m = row["ranks"], row["microbatches"]
    # M_W / M_B of a layer with 32 heads, 4096 wide, 1024 tokens.
    cost = StageCost(f, i, w, activation_bytes=1, weight_gradient_bytes=32 / (34 + 5 * 32 * 1024 / 4096))
    seconds = 20 if m < 100 else 150  # 60 on an idle machine
    found = search(
        Placement.v(p), m, cost, LinkCost(row["comm"]), memory_limit=2 * p, objective="span", seconds=seconds
    )
    rate = 1 - 2 * m * (f + i + w) / found.objective_seconds
    assert rate <= row["bubble_rate"]["zb-v (heuristic, memory limit p)"] + ROUNDING
    assert max(one.peak_activations for one in memory(found.schedule, cost, found.timeline)) <= 2 * p


whole = st.integers(1, 20)


@settings(max_examples=15)
@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.sampled_from(["loop", "v"]))
def test_never_worse_than_a_generator_that_fits(data: st.DataObject, p: int, m: int, shape: str) -> None:
    placement = Placement.loop(p) if shape == "loop" else Placement.v(p)
    costs = [
        StageCost(*(data.draw(whole) for _ in range(3)), activation_bytes=1, weight_gradient_bytes=1)
        for _ in range(placement.stages)
    ]
    link, limit = LinkCost(data.draw(st.integers(0, 5))), data.draw(st.integers(2, 8))
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    found = search(placement, m, costs, link, memory_limit=limit, objective=objective, seconds=0.2)
    assert not [violation for violation in check(found.schedule) if violation.fatal]
    assert max(one.peak_activations for one in memory(found.schedule, costs, found.timeline)) <= limit
    assert found.lower_bound_seconds <= found.objective_seconds * (1 + 1e-9)
    chunks = placement.stages // p
    for entry in schedule_specs():
        numbers = ScheduleParams(p, m, chunks)
        if entry.violated_constraint(numbers) is not None:
            continue
        schedule = entry.make(numbers)
        timeline = simulate(schedule, costs, link)
        fits = max(one.peak_activations for one in memory(schedule, costs, timeline)) <= limit
        if schedule.placement == placement and fits:
            reached = timeline.makespan_seconds if objective == "makespan" else timeline.span_seconds
            assert found.objective_seconds <= reached, entry.name


def test_the_bound_allows_for_overlaps() -> None:
    cost = StageCost(2, 2, 1, overlapped_seconds=3.2)
    found = search(Placement.v(4), 8, cost, objective="span", seconds=0.5)
    assert found.baseline == "dualpipe-v"
    assert found.lower_bound_seconds <= found.objective_seconds
    assert not found.proven


def test_what_is_known_by_name_is_that_schedule() -> None:
    """Not the one with its backwards split, which is better."""
    found = search(Placement.loop(2), 4, UNIT, memory_limit=1, seconds=0.2)
    assert found.baseline == "naive"
    assert found.baseline_seconds == simulate(generate("naive", 2, 4), UNIT).makespan_seconds
    assert found.objective_seconds < found.baseline_seconds


def test_a_rank_that_holds_nothing_needs_no_memory() -> None:
    costs = [UNIT, UNIT, StageCost(1, 1, 1)]
    found = search(Placement.loop(3), 6, costs, memory_limit=[2, 2, 0], seconds=0.2)
    assert not check(found.schedule)


def test_a_seed_gives_the_same_answer_again() -> None:
    costs = [StageCost(2, 3, 1), StageCost(2, 2, 2), StageCost(4, 5, 3)]
    one, two = (search(Placement.loop(3), 6, costs, LinkCost(0.5), seconds=1, seed=3) for _ in range(2))
    assert one.schedule == two.schedule


def test_more_time_is_never_worse() -> None:
    spans = [
        search(Placement.v(4), 8, UNIT, memory_limit=5, objective="span", seconds=seconds).objective_seconds
        for seconds in (0.05, 0.1, 0.2, 0.4)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0.5}, "memory limit 0.5 of rank 0: a single microbatch holds 1 on its stage 0"),
        ({"memory_limit": [1, 2, 3]}, "3 memory limits for 2 ranks"),
        ({"objective": "time"}, "objective='time': expected one of makespan, span"),
        ({"seed": None}, "seed=None: expected an integer"),
        ({"memory_limit": "12"}, "memory_limit='12': expected a number, or one for each rank"),
        ({"seconds": 0}, "seconds=0: expected a time above 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        search(Placement.loop(2), 2, UNIT, **options)

"""The search is at least as good as what was published, and as every generator that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.schedule import Placement, Schedule, check, generate, schedule_specs
from penstock.schedule.generators import ScheduleParams
from penstock.simulate import memory, simulate
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import Objective, lower_bound, search
from penstock.simulate.search.problem import problem
from penstock.simulate.search.timing import fits, time_rows

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


PLACEMENTS = [
    *(Placement.loop(1), Placement.loop(3), Placement.loop(2, 3)),
    *(Placement.v(1), Placement.v(3), Placement.wave(2, 2), Placement.bidirectional(4)),
]


@st.composite
def some_costs(draw: st.DrawFn, stages: int, most: int) -> list[StageCost]:
    """One for each stage: F, I and W of 0 to `most`, and activations of 1 to 3, part of which is held until W."""
    costs = []
    for _ in range(stages):
        seconds, held = (draw(st.integers(0, most)) for _ in range(3)), draw(st.integers(1, 3))
        costs.append(StageCost(*seconds, activation_bytes=held, weight_gradient_bytes=draw(st.integers(0, held))))
    return costs


@settings(max_examples=20)
@given(st.data(), st.sampled_from(PLACEMENTS), st.integers(1, 7), st.sampled_from(["makespan", "span"]))
def test_what_is_found_is_legal_fits_and_is_never_worse_than_a_generator(
    data: st.DataObject, placement: Placement, m: int, objective: Objective
) -> None:
    """Also where memory holds no more than one microbatch: nothing ever waits for room that does not come."""
    costs, link = data.draw(some_costs(placement.stages, most=6)), LinkCost(data.draw(st.integers(0, 3)))
    limits = [
        sum(costs[stage].activation_bytes for stage in stages) + data.draw(st.integers(0, 4))
        for stages in placement.by_rank
    ]

    def judged(schedule: Schedule) -> tuple[float, bool]:
        timeline = simulate(schedule, costs, link)
        peaks = [one.peak_activations for one in memory(schedule, costs, timeline)]
        seconds = timeline.makespan_seconds if objective == "makespan" else timeline.span_seconds
        return seconds, all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))

    found = search(placement, m, costs, link, memory_limit=limits, objective=objective, seconds=0.1, seed=m)
    assert not check(found.schedule)
    assert judged(found.schedule) == (found.objective_seconds, True)
    assert found.lower_bound_seconds <= found.objective_seconds * (1 + 1e-9)
    for entry in schedule_specs():
        numbers = ScheduleParams(placement.ranks, m, placement.depth // placement.ranks)
        if entry.violated_constraint(numbers) is None and (schedule := entry.make(numbers)).placement == placement:
            seconds, does_fit = judged(schedule)
            assert found.objective_seconds <= seconds or not does_fit, entry.name


def every_row(microbatches: int, row: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Each order in which a stage may do its F, I and W, here 0, 1 and 2."""
    if len(row) == 3 * microbatches:
        yield row
    for op in range(3):
        if row.count(op) < (microbatches if op == 0 else row.count(op - 1)):
            yield from every_row(microbatches, (*row, op))


@settings(max_examples=25, derandomize=True)  # that it is the best is no law
@given(some_costs(2, most=5), st.integers(1, 3), st.integers(0, 2), st.sampled_from(["makespan", "span"]), st.data())
def test_the_best_of_all_rows_of_two_ranks_is_found(
    costs: list[StageCost], microbatches: int, latency: int, objective: Objective, data: st.DataObject
) -> None:
    placement, link = Placement.loop(2), LinkCost(latency)
    limit = max(cost.activation_bytes for cost in costs) + data.draw(st.integers(0, 2))
    asked = problem(placement, microbatches, costs, link, memory_limit=limit, objective=objective)
    rows = [[[3 * rank + op for op in row] for row in every_row(microbatches)] for rank in range(2)]
    fitting = product(*([row for row in some if fits(asked, rank, row)] for rank, some in enumerate(rows)))
    least = min(timing.cost for both in fitting if (timing := time_rows(asked, list(both))) is not None)
    found = search(placement, microbatches, costs, link, memory_limit=limit, objective=objective, seconds=0.3)
    assert found.objective_seconds == pytest.approx(least)
    assert found.lower_bound_seconds <= least * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_the_bound_is_what_gpipe_reaches_where_no_weight_gradient_can_wait(p: int, m: int, f: int, i: int) -> None:
    """On the last rank: the first microbatch's way to it, its work, and the last microbatch's way back."""
    asked = problem(Placement.loop(p), m, StageCost(f, i, 0))
    assert lower_bound(asked) == simulate(generate("gpipe", p, m), StageCost(f, i, 0)).makespan_seconds


def test_what_input_gradients_leave_for_weights_counts() -> None:
    """W may need more than F kept; the limit holds all the same, by the memory of the timeline."""
    cost = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=3)
    found = search(Placement.loop(3), 8, cost, memory_limit=4, seconds=0.2)
    assert max(one.peak_activations for one in memory(found.schedule, cost, found.timeline)) <= 4


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
    assert not check(search(Placement.loop(3), 6, costs, memory_limit=[2, 2, 0], seconds=0.2).schedule)


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

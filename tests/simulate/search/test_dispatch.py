"""Rows: every pattern leads to some that are legal and fit; their times are those of the simulation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import Placement, check, generate
from penstock.simulate import memory, simulate
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import Objective, lower_bound, search
from penstock.simulate.search.dispatch import Pattern, dispatch
from penstock.simulate.search.improve import extrapolate, improve
from penstock.simulate.search.pattern import sample, vary
from penstock.simulate.search.problem import Problem, Rows, problem
from penstock.simulate.search.result import serial_rows
from penstock.simulate.search.timing import fits, time_rows

seeds = st.integers(0, 2**32)
PLACEMENTS = [
    Placement.loop(1), Placement.loop(3), Placement.v(1), Placement.v(3), Placement.loop(2, 3), Placement.wave(2, 2),
]  # fmt: skip
TWO_WAYS = Placement.bidirectional(4)


@st.composite
def some_costs(draw: st.DrawFn, stages: int, most: int) -> list[StageCost]:
    """One for each stage: F, I and W of 0 to `most`, and activations of 1 to 3, part of which is held until W."""
    costs = []
    for _ in range(stages):
        held = draw(st.integers(1, 3))
        seconds = (draw(st.integers(0, most)) for _ in range(3))
        costs.append(StageCost(*seconds, activation_bytes=held, weight_gradient_bytes=draw(st.integers(0, held))))
    return costs


@st.composite
def problems(draw: st.DrawFn, placements: list[Placement] = PLACEMENTS) -> tuple[Problem, list[StageCost], LinkCost]:
    placement = draw(st.sampled_from(placements))
    costs = draw(some_costs(placement.stages, most=6))
    limits = []
    for rank in range(placement.ranks):
        least = sum(costs[stage].activation_bytes for stage in placement.stages_on(rank))
        limits.append(least + draw(st.integers(0, 4)))
    link, objective = LinkCost(draw(st.integers(0, 3))), draw(st.sampled_from(["makespan", "span"]))
    asked = problem(placement, draw(st.integers(1, 7)), costs, link, memory_limit=limits, objective=objective)
    return asked, costs, link


def judge(asked: Problem, costs: list[StageCost], link: LinkCost, rows: Rows) -> None:
    """Legal, complete, within the limits, timed as by the library, and not below the bound."""
    schedule = asked.schedule("rows", rows)
    assert not check(schedule)
    assert asked.rows(schedule) == rows
    timeline, timing = simulate(schedule, costs, link), time_rows(asked, rows)
    assert timing is not None
    expected = timeline.makespan_seconds if asked.objective == "makespan" else timeline.span_seconds
    assert timing.cost == pytest.approx(expected)
    assert lower_bound(asked) <= timing.cost * (1 + 1e-9)
    for rank, one in enumerate(memory(schedule, costs, timeline)):
        assert one.peak_activations <= asked.limit[rank]
        assert fits(asked, rank, rows[rank])


@given(problems(), seeds)
def test_every_pattern_leads_to_legal_rows_that_fit(
    drawn: tuple[Problem, list[StageCost], LinkCost], seed: int
) -> None:
    """Also where memory holds no more than one microbatch: nothing ever waits for room that does not come."""
    asked, random = drawn[0], Random(seed)
    pattern = sample(asked, random)
    for _ in range(3):
        rows = dispatch(asked, pattern)
        assert rows is not None
        judge(*drawn, rows)
        pattern = vary(asked, pattern, random)


@given(problems([TWO_WAYS]), seeds)
def test_with_two_pipelines_it_may_give_up_but_never_locks(
    drawn: tuple[Problem, list[StageCost], LinkCost], seed: int
) -> None:
    rows = dispatch(drawn[0], sample(drawn[0], Random(seed)))
    if rows is not None:
        judge(*drawn, rows)
    judge(*drawn, serial_rows(drawn[0]))


@given(problems())
def test_one_microbatch_at_a_time_always_fits(drawn: tuple[Problem, list[StageCost], LinkCost]) -> None:
    judge(*drawn, serial_rows(drawn[0]))


@settings(max_examples=25)
@given(problems(), seeds)
def test_moving_actions_keeps_rows_legal_and_never_makes_them_worse(
    drawn: tuple[Problem, list[StageCost], LinkCost], seed: int
) -> None:
    asked = drawn[0]
    before = serial_rows(asked)
    cost, rows = improve(asked, before, Random(seed), 10_000, 10_000, 0.0, 0.1, 5.0)
    judge(*drawn, rows)
    timing, first = time_rows(asked, rows), time_rows(asked, before)
    assert timing is not None
    assert first is not None
    assert timing.cost == cost <= first.cost


@given(problems(), seeds, st.data())
def test_a_row_that_differs_late_is_timed_from_there(
    drawn: tuple[Problem, list[StageCost], LinkCost], seed: int, data: st.DataObject
) -> None:
    asked = drawn[0]
    rows = dispatch(asked, sample(asked, Random(seed)))
    assert rows is not None
    before = time_rows(asked, rows)
    assert before is not None
    rank = data.draw(st.integers(0, asked.ranks - 1))
    i, to = (data.draw(st.integers(0, len(rows[rank]) - 1)) for _ in range(2))
    changed = [row[:] for row in rows]
    changed[rank].insert(to, changed[rank].pop(i))
    since = before.starts[rows[rank][min(i, to)]][rows[rank][: min(i, to)].count(rows[rank][min(i, to)])]
    if fits(asked, rank, changed[rank]):
        whole = time_rows(asked, changed)
        assert time_rows(asked, changed, previous=before, changed_at=since) == whole
        if whole is not None:
            assert time_rows(asked, changed, whole.cost, before, since) == whole
            assert time_rows(asked, changed, whole.cost - 0.5, before, since) in (None, whole)


@given(problems(), seeds, st.integers(1, 9))
def test_rows_that_are_stretched_are_legal_and_fit(
    drawn: tuple[Problem, list[StageCost], LinkCost], seed: int, more: int
) -> None:
    few = drawn[0]
    many = few.with_microbatches(few.microbatches + more)
    rows = dispatch(few, sample(few, Random(seed)))
    assert rows is not None
    stretched = extrapolate(few, rows, many)
    if stretched is not None:
        cost, made = stretched
        judge(many, *drawn[1:], made)
        timing = time_rows(many, made)
        assert timing is not None
        assert timing.cost == cost


def every_row(microbatches: int, row: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Each order in which a stage may do its F, I and W, here 0, 1 and 2."""
    if len(row) == 3 * microbatches:
        yield row
    for op in range(3):
        if row.count(op) < (microbatches if op == 0 else row.count(op - 1)):
            yield from every_row(microbatches, (*row, op))


@settings(max_examples=25, derandomize=True)  # that it is the best is no law
@given(some_costs(2, most=5), st.integers(1, 3), st.integers(0, 2), st.sampled_from(["makespan", "span"]), st.data())
def test_the_search_finds_the_best_of_all_rows_of_two_ranks(
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


def test_timing_gives_up_when_it_is_sure_of_too_much() -> None:
    asked = problem(Placement.loop(4), 4, StageCost(1, 1, 1))
    rows = serial_rows(asked)
    assert time_rows(asked, rows, 36) is not None
    assert time_rows(asked, rows, 35) is None


def test_timing_sees_a_circle_and_an_action_before_what_it_waits_for() -> None:
    asked = problem(Placement.loop(2), 1, StageCost(1, 1, 1))
    assert time_rows(asked, [[0, 1, 2], [3, 4, 5]]) is not None
    assert time_rows(asked, [[1, 0, 2], [3, 4, 5]]) is None
    assert not fits(asked, 0, [1, 0, 2])


def test_window_0_keeps_the_pattern_s_order() -> None:
    """With room for all, forwards go as far ahead as the pattern has them, and not further."""
    asked = problem(Placement.loop(1), 6, StageCost(1, 1, 1))
    pattern = Pattern((0.0,), (6.0,), (1.0,), 3.0, 0.0, 0.0, ((1.0, 1.0),))
    made = dispatch(asked, pattern)
    assert made is not None
    assert [lane for lane in made[0] if lane < 2] == [0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("left", [1, 3])
def test_what_input_gradients_leave_for_weights_counts(left: float) -> None:
    """W may need more than F kept; the limit holds all the same, by the memory of the timeline."""
    cost, placement, limit = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=left), Placement.loop(3), 4
    found = search(placement, 8, cost, memory_limit=limit, seconds=0.2)
    check(found.schedule)
    assert max(one.peak_activations for one in memory(found.schedule, cost, found.timeline)) <= limit

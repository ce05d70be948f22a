"""Closed forms of the literature: p ranks, m microbatches, T = F + I + W, latency c charged once an edge."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import (
    Schedule,
    add_communication,
    generate,
    reduce_ties,
    split_backward,
)
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost
from scaffolding.some_schedules import generated

# Whole numbers: sums of them are exact.
costs = st.builds(StageCost, *[st.integers(1, 50).map(float)] * 3)
small = st.integers(1, 8)
microbatches = st.integers(1, 32)


@settings(max_examples=50)
@given(generated(), costs, st.booleans())
def test_messages_and_reductions_change_nothing(schedule: Schedule, cost: StageCost, split: bool) -> None:
    schedule = split_backward(schedule) if split else schedule
    lowered = reduce_ties(add_communication(schedule), [range(schedule.stages)])
    assert simulate(lowered, cost, LinkCost(3)) == simulate(schedule, cost, LinkCost(3))


def test_stages_of_one_rank_pay_no_latency() -> None:
    assert (
        simulate(generate("gpipe", 1, 2, stages_per_rank=3), StageCost(1, 1, 1), LinkCost(100)).makespan_seconds == 18
    )


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ArgumentError, match="2 costs for 3 stages"):
        simulate(generate("gpipe", 3, 2), [StageCost(1, 1, 1)] * 2)
    with pytest.raises(ScheduleError, match="waits at 0B0"):
        simulate(Schedule.parse("x: 1 microbatch, stages on ranks 0\nrank 0: 0B0 0F0"), StageCost(1, 1, 1))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(wrong: float) -> None:
    with pytest.raises(ArgumentError, match="backward_weight_seconds"):
        StageCost(1, 1, wrong)
    with pytest.raises(ArgumentError, match="latency_seconds"):
        LinkCost(wrong)
    with pytest.raises(ArgumentError, match="bytes_per_second"):
        LinkCost(0, 0)


def test_ranks_that_begin_later() -> None:
    schedule, cost = generate("1f1b", 2, 2), StageCost(1, 1, 1)
    plain = simulate(schedule, cost)
    later = simulate(schedule, cost, begin=[5, 5])
    assert [span.start_seconds for span in later] == [5 + span.start_seconds for span in plain]
    assert simulate(schedule, cost, begin=[0, 1]) == plain
    assert next(simulate(schedule, cost, begin=[0, 10]).spans(1)).start_seconds == 10
    for wrong in ([1.0], [0.0, -1.0], [0.0, float("nan")]):
        with pytest.raises(ArgumentError, match="a time of 0 or more for each of 2 ranks"):
            simulate(schedule, cost, begin=wrong)

"""Closed forms of the literature: p ranks, m microbatches, T = F + I + W, latency c charged once an edge."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError, ScheduleError
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


def total(cost: StageCost) -> float:
    return cost.forward_seconds + cost.backward_seconds


@given(small, microbatches, costs, st.integers(0, 20))
def test_naive(p: int, m: int, cost: StageCost, c: int) -> None:
    timeline = simulate(generate("naive", p, m), cost, LinkCost(c))
    assert timeline.makespan_seconds == m * (p * total(cost) + 2 * (p - 1) * c)


@given(st.sampled_from(["gpipe", "1f1b"]), small, microbatches, costs)
def test_gpipe_and_1f1b_without_latency(name: str, p: int, m: int, cost: StageCost) -> None:
    timeline = simulate(generate(name, p, m), cost)
    T = total(cost)
    assert timeline.makespan_seconds == timeline.span_seconds == (m + p - 1) * T
    assert timeline.bubble_rate == pytest.approx((p - 1) / (m + p - 1))
    assert [timeline.busy_seconds(rank) for rank in range(p)] == [m * T] * p


@given(st.integers(2, 8), st.integers(1, 4), costs.filter(lambda cost: cost.backward_seconds > 8))
def test_1f1b_with_latency(p: int, rounds: int, cost: StageCost) -> None:
    m, c = p * rounds, 0.25
    timeline = simulate(generate("1f1b", p, m), cost, LinkCost(c))
    assert timeline.makespan_seconds == (m + p - 1) * total(cost) + (2 * (p - 1) * m / p + 2 * (p - 2)) * c


@pytest.mark.parametrize(("times", "c", "p", "m", "cost"), [((2 * 4959, 2 * 5217, 2 * 3519), 213, 8, 24, 860592)])
def test_1f1b_of_the_published_v_schedule_comparison(
    times: tuple[float, float, float], c: float, p: int, m: int, cost: float
) -> None:
    timeline = simulate(generate("1f1b", p, m), StageCost(*times), LinkCost(c))
    assert timeline.makespan_seconds == timeline.span_seconds == cost


# Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, Tables 5 and 6, and the authors' V-schedule evaluation:
# ranks, microbatches, (F, I, W) and c in microseconds, bubble rate of 1F1B.
PUBLISHED = [
    (8, 24, (18522, 18086, 9337), 601, 0.2431),
    (8, 32, (18513, 18086, 9331), 626, 0.1985),
    (8, 64, (18546, 18097, 9321), 762, 0.124),
    (16, 48, (11347, 11248, 8132), 377, 0.2552),
    (16, 64, (11307, 11254, 8101), 379, 0.2082),
    (16, 128, (11325, 11308, 8109), 378, 0.1251),
    (16, 48, (28814, 28760, 19352), 1610, 0.2668),
    (16, 64, (28824, 28786, 19376), 1621, 0.2206),
    (16, 128, (28632, 28612, 19278), 1619, 0.139),
]


@pytest.mark.parametrize(("p", "m", "times", "c", "rate"), PUBLISHED)
def test_1f1b_of_the_zero_bubble_papers(
    p: int, m: int, times: tuple[float, float, float], c: float, rate: float
) -> None:
    timeline = simulate(generate("1f1b", p, m), StageCost(*times), LinkCost(c))
    assert timeline.bubble_rate == pytest.approx(rate, abs=1e-4)


@pytest.mark.parametrize(("p", "speedup"), [(2, 1.94), (4, 3.66), (8, 6.56)])
def test_gpipes_table_2_bubble(p: int, speedup: float) -> None:
    cost = StageCost(1.0, 1.0, 1.0)
    alone, together = simulate(generate("gpipe", 1, 32), cost), simulate(generate("gpipe", p, 32), cost)
    assert p * alone.makespan_seconds / together.makespan_seconds == pytest.approx(speedup, abs=0.005)


@settings(max_examples=50)
@given(generated(), costs, st.booleans())
def test_messages_and_reductions_change_nothing(schedule: Schedule, cost: StageCost, split: bool) -> None:
    schedule = split_backward(schedule) if split else schedule
    lowered = reduce_ties(add_communication(schedule), [range(schedule.stages)])
    assert simulate(lowered, cost, LinkCost(3)) == simulate(schedule, cost, LinkCost(3))


def test_bytes_take_time_in_both_directions() -> None:
    timeline = simulate(
        generate("gpipe", 2, 1), [StageCost(1, 1, 1, output_bytes=100), StageCost(1, 1, 1)], LinkCost(0.5, 200.0)
    )
    assert timeline.makespan_seconds == 6 + 2 * (0.5 + 100 / 200)


def test_stages_of_one_rank_pay_no_latency() -> None:
    assert simulate(generate("gpipe", 1, 2, chunks=3), StageCost(1, 1, 1), LinkCost(100)).makespan_seconds == 18


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

"""Why ranks wait, and what the whole waits for: every moment of every rank has one cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import Action, Op, Schedule, add_communication, generate, reduce_ties
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import IdleCause, critical_path, idle_time_by_cause, simulate
from penstock.simulate.costs import LinkCost, StageCost
from scaffolding.nanoseconds import from_nanoseconds
from scaffolding.some_schedules import small_ones, with_overlaps

ROUNDING = Fraction(1, 2**40)
"""Of a sum of some hundred numbers, each rounded at 53 bits."""

number = st.integers(0, 9).map(float)
stage_costs = st.builds(
    StageCost, number, number, number, output_bytes=number, overlapped_seconds=st.one_of(st.none(), number)
)
links = st.builds(LinkCost, number, st.sampled_from([0.25, 0.5, 1.0]))
schedules = small_ones()


def simulated(schedule: Schedule, data: st.DataObject) -> Timeline:
    costs = data.draw(st.lists(stage_costs, min_size=schedule.stages, max_size=schedule.stages))
    return simulate(schedule, costs, data.draw(links))


def causes(schedule: Schedule, timeline: Timeline) -> list[dict[str, float]]:
    """What is above 0 only, by its name."""
    return [
        {cause.value: seconds for cause, seconds in rank.items() if seconds}
        for rank in idle_time_by_cause(schedule, timeline)
    ]


def measured(schedule: Schedule, *rows: str) -> Timeline:
    """A real run: for each rank its actions as 'action begin ready end', in nanoseconds."""
    return from_nanoseconds(
        [
            [
                (Action.parse(action), *map(int, moments))
                for action, *moments in (text.split(" ") for text in row.split(", "))
            ]
            for row in rows
        ]
    )


# -- idle -------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(schedules, st.data())
def test_idle_and_busy_together_are_the_makespan(schedule: Schedule, data: st.DataObject) -> None:
    schedule = with_overlaps(schedule, iter(lambda: data.draw(st.booleans()), None))
    try:
        timeline = simulated(schedule, data)
    except ScheduleError:
        return  # overlaps that wait for themselves
    report = idle_time_by_cause(schedule, timeline)
    for rank, by_cause in enumerate(report):
        assert set(by_cause) == set(IdleCause)
        assert min(by_cause.values()) >= 0
        whole = sum(map(Fraction, (*by_cause.values(), timeline.busy_seconds(rank))))
        assert abs(whole - Fraction(timeline.makespan_seconds)) <= ROUNDING * Fraction(timeline.makespan_seconds)
        assert by_cause[IdleCause.OTHER] == 0
    assert idle_time_by_cause(reduce_ties(add_communication(schedule), [range(schedule.stages)]), timeline) == report


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_without_latency_the_first_rank_waits_for_backwards_only(name: str, p: int, m: int, f: int, b: int) -> None:
    schedule = generate(name, p, m)
    first, *_, last = [*causes(schedule, timeline := simulate(schedule, StageCost(f, b, 0))), {}][:p] * 2
    assert set(first) <= {"waiting for backward"}
    assert last == ({"warm-up": (p - 1) * f, "cool-down": (p - 1) * b} if p > 1 else {})
    assert sum(first.values()) == timeline.makespan_seconds - m * (f + b)


def test_each_cause_in_a_case_made_by_hand() -> None:
    schedule = generate("gpipe", 2, 2)
    slow_first = simulate(schedule, [StageCost(5, 1, 0), StageCost(1, 1, 0)])
    assert causes(schedule, slow_first)[1] == {"warm-up": 5, "waiting for forward": 4, "cool-down": 1}
    slow_last = simulate(schedule, [StageCost(1, 1, 0), StageCost(1, 5, 0)])
    assert causes(schedule, slow_last)[0] == {"waiting for backward": 1 + 5 + 4}
    slow_link = simulate(schedule, StageCost(1, 1, 0), LinkCost(7))
    assert causes(schedule, slow_link) == [
        {"waiting for backward": 9, "link": 7},
        {"warm-up": 8, "cool-down": 8},
    ]


def test_a_rank_waits_for_the_later_of_what_two_that_overlap_need() -> None:
    schedule = Schedule.parse(
        "x: 2 microbatches, stages on ranks 0 1 2\n"
        "rank 0: 0F0 0F1 0B0 0B1\n"
        "rank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1\n"
        "rank 2: 2F0 2B0 2F1 2B1"
    )
    cost = StageCost(1, 1, 0)
    timeline = simulate(schedule, [replace(cost, forward_seconds=9), cost, cost])  # 0F1 ends at 18, 2B0 at 12
    assert idle_time_by_cause(schedule, timeline)[1][IdleCause.FORWARD] == 8
    assert "0F1" in [str(span.action) for span in critical_path(schedule, timeline).spans]
    timeline = simulate(
        schedule, [cost, cost, replace(cost, backward_input_seconds=20)]
    )  # 0F1 ends at 2, 2B0 at 23, 2B1 at 46
    assert idle_time_by_cause(schedule, timeline)[1][IdleCause.BACKWARD] == 21 + 21
    assert "2B0" in [str(span.action) for span in critical_path(schedule, timeline).spans]


def test_two_that_overlap_on_the_rank_before_are_not_the_link() -> None:
    """Rank 1 waits for 0F1, which with 0B0 beside it takes until both end."""
    schedule = Schedule.parse(
        "x: 2 microbatches, stages on ranks 0 1\nrank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    )
    timeline = simulate(schedule, StageCost(2, 4, 0), LinkCost(1))
    # 1B0 ends at 9, 0F1 and 0B0 run from 10 to 16, and 1F1 starts at 17.
    assert causes(schedule, timeline)[1] == {"warm-up": 3, "waiting for forward": 7, "link": 1, "cool-down": 5}
    path = critical_path(schedule, timeline)
    assert [str(span.action) for span in path.spans] == ["0F0", "1F0", "1B0", "0F1", "0B0", "1F1", "1B1", "0B1"]
    assert path.link_seconds == 4


def test_a_real_run_with_messages_in_it() -> None:
    schedule = generate("gpipe", 2, 1)
    timeline = measured(
        schedule,
        "0F0 100 110 200, 0SEND_F0 200 200 205, 0RECV_B0 205 205 206, 0B0 206 480 600, 0REDUCE_GRAD0 600 600 640",
        "1RECV_F0 100 100 101, 1F0 101 230 300, 1B0 320 320 450, 1SEND_B0 450 450 455",
    )
    first, second = (
        {cause: round(seconds * 1e9, 6) for cause, seconds in rank.items()} for rank in causes(schedule, timeline)
    )
    assert first == {"warm-up": 10, "waiting for backward": 250, "link": 30, "cool-down": 40}
    assert second == {"warm-up": 130, "other": 20, "cool-down": 190}
    assert timeline.makespan_seconds == 540e-9
    path = critical_path(schedule, timeline)
    assert [str(span.action) for span in path.spans] == ["0F0", "1F0", "1B0", "0B0"]
    assert path.link_seconds == pytest.approx(90e-9)


def test_ranks_that_ran_nothing() -> None:
    schedule = Schedule.parse("x: 1 microbatch, stages on ranks 0 1\nrank 0: 0F0\nrank 1:")
    assert causes(schedule, simulate(schedule, StageCost(3, 1, 1))) == [{}, {"warm-up": 3}]
    nothing = Schedule.parse("x: 1 microbatch, stages on ranks 0\nrank 0:")
    path = critical_path(nothing, simulate(nothing, StageCost(1, 1, 1)))
    assert (path.spans, path.link_seconds) == ((), 0)


def test_a_clock_that_is_off_does_not_make_time_negative() -> None:
    """The need seems to end after what waited for it had started: two processes' clocks differ a little."""
    schedule = generate("gpipe", 2, 2)
    timeline = measured(
        schedule,
        "0F0 0 0 10, 0F1 10 10 30, 0B0 30 48 60, 0B1 60 60 80",
        "1F0 0 12 20, 1F1 20 28 38, 1B0 38 38 50, 1B1 50 50 58",
    )
    for rank, by_cause in enumerate(idle_time_by_cause(schedule, timeline)):
        assert min(by_cause.values()) >= 0
        total = sum(by_cause.values()) + timeline.busy_seconds(rank)
        assert total == pytest.approx(timeline.makespan_seconds, abs=1e-15)


# -- critical path ----------------------------------------------------------------------------------------------------


def exact_seconds(spans: Iterable[Span]) -> Fraction:
    """Without rounding: what overlaps is divided, so that moments may be no round numbers."""
    return sum((Fraction(span.end_seconds) - Fraction(span.start_seconds) for span in spans), Fraction())


@settings(max_examples=150)
@given(schedules, st.data())
def test_the_critical_path_leads_from_0_to_the_end_without_a_hole(schedule: Schedule, data: st.DataObject) -> None:
    schedule = with_overlaps(schedule, iter(lambda: data.draw(st.booleans()), None))
    try:
        timeline = simulated(schedule, data)
    except ScheduleError:
        return
    path = critical_path(schedule, timeline)
    assert path.spans[0].start_seconds == 0
    assert path.spans[-1].end_seconds == timeline.makespan_seconds
    on_links = Fraction(timeline.makespan_seconds) - exact_seconds(path.spans)
    assert abs(Fraction(path.link_seconds) - on_links) <= ROUNDING * Fraction(timeline.makespan_seconds)
    for op in Op:
        seconds = exact_seconds(span for span in path.spans if span.action.op is op)
        assert abs(Fraction(path.seconds(op)) - seconds) <= ROUNDING * seconds
    spans = {(span.rank, span.action): span for span in timeline}
    for span in path.spans:
        assert spans[span.rank, span.action] == span
    for before, after in pairwise(path.spans):
        assert before.end_seconds <= after.start_seconds
        assert before.end_seconds == after.start_seconds or before.rank != after.rank


@settings(max_examples=150)
@given(schedules.map(lambda s: s.with_rows([list(row) for row in s.rows])), st.data())
def test_only_the_critical_path_decides(schedule: Schedule, data: st.DataObject) -> None:
    """A stage that is not on it may get shorter: the path is still there. One that is on it must not get longer."""
    costs = data.draw(st.lists(stage_costs, min_size=schedule.stages, max_size=schedule.stages))
    link = data.draw(links)
    timeline = simulate(schedule, costs, link)
    path = critical_path(schedule, timeline)
    for stage, cost in enumerate(costs):
        times = [span.action.op for span in path.spans if span.action.stage == stage].count(Op.F)
        longer = [*costs[:stage], replace(cost, forward_seconds=cost.forward_seconds + 1), *costs[stage + 1 :]]
        assert simulate(schedule, longer, link).makespan_seconds >= timeline.makespan_seconds + times
        if not any(span.action.stage == stage for span in path.spans):
            nothing = replace(cost, forward_seconds=0, backward_input_seconds=0, backward_weight_seconds=0)
            shorter = [*costs[:stage], nothing, *costs[stage + 1 :]]
            assert simulate(schedule, shorter, link).makespan_seconds == timeline.makespan_seconds


def test_the_critical_path_of_1f1b_goes_there_and_back() -> None:
    schedule = generate("1f1b", 3, 3)
    path = critical_path(schedule, simulate(schedule, StageCost(1, 1, 1)))
    assert [str(span.action) for span in path.spans] == [
        "0F0", "1F0", "2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "1B2", "0B2",
    ]  # fmt: skip
    assert (path.link_seconds, path.seconds(Op.F), path.seconds(Op.B)) == (0, 5, 10)


def test_nobody_waits_for_ranks_that_take_turns() -> None:
    schedule = generate("gpipe", 2, 2)
    turns = replace(simulate(schedule, StageCost(1, 2, 0)), serialized=True)
    for look in (idle_time_by_cause, critical_path):
        with pytest.raises(ArgumentError, match="ranks that took turns in one process"):
            look(schedule, turns)

"""Any schedule with any costs of stages and links, held against simulations that are too plain to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import tick

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import (
    Action,
    Op,
    Placement,
    Schedule,
    add_communication,
    drop_backward,
    generate,
    reduce_ties,
)
from penstock.simulate import Links, simulate
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import search
from scaffolding.some_schedules import small_ones, with_overlaps

# Whole numbers: sums of them are exact.
from_zero, from_one = st.integers(0, 9).map(float), st.integers(1, 5).map(float)
schedules = small_ones()


def draw_links(data: st.DataObject, schedule: Schedule) -> dict[tuple[int, int], LinkCost]:
    link = st.builds(LinkCost, from_zero, st.sampled_from([0.25, 0.5, 1.0]))
    pairs = [(a, b) for a in range(schedule.ranks) for b in range(schedule.ranks) if a != b]
    return {pair: data.draw(link) for pair in pairs}


@settings(max_examples=200)
@given(schedules, st.data())
def test_the_clock_that_ticks(schedule: Schedule, data: st.DataObject) -> None:
    """Some stages have one cost, others one for each microbatch; some may be frozen."""
    if data.draw(st.booleans()):
        schedule = drop_backward(schedule, data.draw(st.sets(st.integers(0, schedule.stages - 1))))
    schedule = with_overlaps(schedule, iter(lambda: data.draw(st.booleans()), None))
    three, overlapped = (from_one, from_one, from_one), st.one_of(st.none(), from_one)
    one = st.builds(StageCost, *three, output_bytes=from_zero, overlapped_seconds=overlapped)
    each = st.lists(one, min_size=schedule.microbatches, max_size=schedule.microbatches)
    costs = [data.draw(st.one_of(one, each)) for _ in range(schedule.stages)]
    links = draw_links(data, schedule)
    ticked = tick(
        schedule, [[cost] * schedule.microbatches if isinstance(cost, StageCost) else cost for cost in costs], links
    )
    if ticked is None:
        with pytest.raises(ScheduleError, match="deadlock"):
            simulate(schedule, costs, links)
        return
    timeline = simulate(schedule, costs, links)
    times = {span.action: (span.start_seconds, span.end_seconds) for span in timeline}
    items = [item.parts for row in schedule.rows for item in row.items()]
    assert {parts: (times[parts[0]][0], times[parts[-1]][1]) for parts in items} == {
        parts: ticked[parts[0]] for parts in items
    }
    assert all(times[one][1] == times[two][0] for one, *others in items for two in others)
    lowered = reduce_ties(add_communication(schedule), [range(schedule.stages)])
    assert simulate(lowered, costs, links) == timeline


def starts(schedule: Schedule, rank: int, cost: StageCost, links: Links) -> list[float]:
    return list(simulate(schedule, cost, links).tracks[rank].start)


def test_each_direction_and_each_pair_has_a_link_of_its_own() -> None:
    links = {(0, 1): LinkCost(1), (1, 2): LinkCost(10), (2, 1): LinkCost(100), (1, 0): LinkCost(1000)}
    timeline = simulate(generate("gpipe", 3, 1), StageCost(0, 0, 0), links)
    assert [list(track.start) for track in timeline.tracks] == [[0, 1111], [1, 111], [11, 11]]
    del links[2, 1]
    with pytest.raises(ArgumentError, match="no cost from rank 2 to rank 1"):
        simulate(generate("gpipe", 3, 1), StageCost(0, 0, 0), links)


def test_a_gradient_is_as_large_as_the_output_that_it_is_of() -> None:
    costs = [StageCost(1, 1, 1, output_bytes=5), StageCost(1, 1, 1, output_bytes=77)]
    assert simulate(generate("gpipe", 2, 1), costs, LinkCost(0, 1)).makespan_seconds == 6 + 2 * 5


def test_of_two_that_overlap_the_outputs_leave_when_both_have_ended() -> None:
    schedule = Schedule.parse(
        "x: 2 microbatches, stages on ranks 0 1\nrank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    )
    cost = StageCost(2, 2, 2, overlapped_seconds=3)
    timeline = simulate(schedule, cost)
    # 0B0 waits for 1B0, which ends at 8, and 0F1 with it; both are done at 11, and 1F1 starts.
    assert list(timeline.tracks[0].start) == [0, 8, 9, 17]
    assert list(timeline.tracks[1].start) == [2, 4, 11, 13]
    apart = simulate(schedule, replace(cost, overlapped_seconds=None))
    assert list(apart.tracks[1].start) == [2, 4, 14, 16]


def test_two_that_overlap_take_what_the_forwards_microbatch_says() -> None:
    schedule = Schedule.parse(
        "x: 3 microbatches, stages on ranks 0\nrank 0: 0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"
    )
    cost = StageCost(1, 2, 0)
    costs = [[cost, replace(cost, overlapped_seconds=2.5), cost]]
    assert list(simulate(schedule, costs).tracks[0].end)[2::2] == [3.5, 6.5]


def test_an_overlap_that_waits_for_its_own_output_is_refused() -> None:
    schedule = Schedule.parse(
        "x: 2 microbatches, stages on ranks 0 1\nrank 0: 0F1 (0F0;0B1)OVERLAP_F_B 0B0\nrank 1: 1F0 1F1 1B1 1B0"
    )
    with pytest.raises(ScheduleError, match="write the two as separate actions"):
        simulate(schedule, StageCost(1, 1, 1))


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 3000))
def test_two_that_overlap_take_what_is_given_without_rounding(f: int, b: int, total: int) -> None:
    m = 20
    pairs = " ".join(f"(0F{k + 1};0B{k})OVERLAP_F_B" for k in range(m - 1))
    schedule = Schedule.parse(f"x: {m} microbatches, stages on ranks 0\nrank 0: 0F0 {pairs} 0B{m - 1}")
    timeline = simulate(schedule, StageCost(f, b, 0, overlapped_seconds=total))
    assert timeline.makespan_seconds == timeline.busy_seconds(0) == f + (m - 1) * total + b


def test_actions_on_a_rank_that_does_not_own_their_stage_are_refused() -> None:
    schedule = Schedule("x", Placement.loop(2), 1, [[Action(1, Op.F, 0)], [Action(0, Op.F, 0)]])
    with pytest.raises(ScheduleError, match="does not own their stage"):
        simulate(schedule, StageCost(1, 1, 1))
    with pytest.raises(ScheduleError, match="out of range"):
        simulate(Schedule.parse("x: 1 microbatch, stages on ranks 0\nrank 0: 0F0 0F1"), StageCost(1, 1, 1))


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ArgumentError, match="2 costs for 3 stages"):
        simulate(generate("gpipe", 3, 2), [StageCost(1, 1, 1)] * 2)
    with pytest.raises(ScheduleError, match="waits at 0B0"):
        simulate(Schedule.parse("x: 1 microbatch, stages on ranks 0\nrank 0: 0B0 0F0"), StageCost(1, 1, 1))
    schedule, cost = generate("1f1b", 2, 4), StageCost(1, 1, 1)
    with pytest.raises(ArgumentError, match="stage 1 has 3 costs for 4 microbatches; pass one, or one for each"):
        simulate(schedule, [cost, [cost] * 3])
    with pytest.raises(ArgumentError, match="stage 0: parameter_bytes is not the same for all microbatches"):
        simulate(schedule, [[cost, cost, cost, replace(cost, parameter_bytes=1)], cost])
    with pytest.raises(ArgumentError, match="the search takes one for each stage"):
        search(Placement.loop(2), 4, [cost, [cost] * 4], seconds=1)  # type: ignore[list-item]


def test_a_copy_of_the_model_costs_what_the_model_costs() -> None:
    schedule, costs = generate("chimera", 2, 2), [StageCost(1, 2, 3), StageCost(4, 5, 6)]
    assert simulate(schedule, costs) == simulate(schedule, costs * 2)
    with pytest.raises(ArgumentError, match="3 costs for 4 stages"):
        simulate(schedule, [*costs, costs[0]])


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e308, 1e100])
def test_costs_that_are_none_and_numbers_whose_sums_could_be_infinite_are_refused(wrong: float) -> None:
    with pytest.raises(ArgumentError, match=r"backward_weight_seconds=.*: expected a"):
        StageCost(1, 1, wrong)
    with pytest.raises(ArgumentError, match=r"latency_seconds=.*: expected a"):
        LinkCost(wrong)
    for bandwidth in (0, 1e-308):
        with pytest.raises(ArgumentError, match=r"bytes_per_second=.*: expected a bandwidth above"):
            LinkCost(0, bandwidth)


def test_ranks_that_begin_later() -> None:
    schedule, cost = generate("1f1b", 2, 2), StageCost(1, 1, 1)
    plain = simulate(schedule, cost)
    later = simulate(schedule, cost, begin=[5, 5])
    assert [span.start_seconds for span in later] == [5 + span.start_seconds for span in plain]
    assert simulate(schedule, cost, begin=[0, 1]) == plain
    assert next(simulate(schedule, cost, begin=[0, 10]).spans(1)).start_seconds == 10
    for begin in ([1.0], [0.0, -1.0], [0.0, float("nan")]):
        with pytest.raises(ArgumentError, match="a time of 0 or more for each of 2 ranks"):
            simulate(schedule, cost, begin=begin)

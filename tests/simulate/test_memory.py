"""Memory over time, held against a sum over microbatches that is too plain to be wrong."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.schedule import (
    Action,
    Op,
    Schedule,
    add_communication,
    add_sharding,
    drop_backward,
    generate,
    peak_activations,
    reduce_ties,
    split_backward,
)
from penstock.schedule.timeline import Timeline
from penstock.simulate import Memory, memory, peaks, simulate
from penstock.simulate.costs import StageCost
from scaffolding.nanoseconds import from_nanoseconds
from scaffolding.some_schedules import arbitrary, generated

schedules = st.one_of(
    arbitrary(),
    generated(max_ranks=4, max_microbatches=6),
    generated(max_ranks=4, max_microbatches=6).map(split_backward),
    st.tuples(generated(max_ranks=4, max_microbatches=6), st.sets(st.integers(0, 7))).map(lambda t: drop_backward(*t)),
)
seconds = st.integers(1, 5).map(float)


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCost:
    activation = draw(st.integers(0, 9))
    return StageCost(
        draw(seconds),
        draw(seconds),
        draw(seconds),
        activation_bytes=activation,
        weight_gradient_bytes=draw(st.integers(0, 12)),  # I may leave more for W than F kept
        parameter_bytes=draw(st.integers(0, 9)),
        gradient_bytes=draw(st.integers(0, 9)),
        optimizer_bytes=draw(st.integers(0, 9)),
    )


def held_at(moment: float, rank: int, schedule: Schedule, costs: list[StageCost], timeline: Timeline) -> float:
    """What one rank holds right after a moment: each microbatch of each stage looked at by itself."""
    spans = {span.action: span for span in timeline.spans(rank)}

    def over(*actions: Action) -> bool:
        return any(action in spans and spans[action].end_seconds <= moment for action in actions)

    total = 0.0
    for stage in schedule.placement.stages_on(rank):
        trained = any(a.stage == stage and a.op.is_backward for a in spans)
        for k in schedule.numbers_on(stage):
            f, b, i, w = (Action(stage, op, k) for op in (Op.F, Op.B, Op.I, Op.W))
            if spans[f].start_seconds <= moment and not over(b, w) and (trained or not over(f)):
                needs_all = costs[stage].activation_bytes
                total += costs[stage].weight_gradient_bytes if over(i) else needs_all
    return total


def at(course: Memory, moment: float) -> float:
    """What a memory says is held right after a moment."""
    return ([0.0, *(a for s, a in zip(course.seconds, course.activations, strict=True) if s <= moment)])[-1]


@settings(max_examples=100)
@given(schedules, st.data())
def test_the_sum_over_microbatches(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(st.lists(stage_costs(), min_size=schedule.stages, max_size=schedule.stages))
    timeline = simulate(schedule, costs)
    for rank, course in enumerate(memory(schedule, costs, timeline)):
        assert all(one <= two for one, two in pairwise(course.seconds))
        held = []
        for span in timeline.spans(rank):
            for moment in (span.start_seconds, (span.start_seconds + span.end_seconds) / 2, span.end_seconds):
                held.append(held_at(moment, rank, schedule, costs, timeline))
                assert at(course, moment) == held[-1]
        assert at(course, timeline.makespan_seconds) == 0
        # Where one ends and the next one starts at one moment, the rank lets go before it takes.
        assert course.peak_activations == max(held, default=0)
        mine = [costs[stage] for stage in schedule.placement.stages_on(rank)]
        assert course.parameters == sum(cost.parameter_bytes for cost in mine)
        assert course.gradients == sum(cost.gradient_bytes for cost in mine)
        assert course.optimizer == sum(cost.optimizer_bytes for cost in mine)
        assert course.peak == course.parameters + course.gradients + course.optimizer + course.peak_activations


@given(schedules, st.integers(2, 4), st.booleans())
def test_gathered_parameters_are_held_from_unshard_to_reshard(schedule: Schedule, window: int, messages: bool) -> None:
    """A walk along each row: what is gathered while an action runs, and the most at once."""
    lowered = add_sharding(add_communication(schedule) if messages else schedule, set(range(schedule.stages)), window)
    costs = [StageCost(1, 1, 1, activation_bytes=3, unsharded_bytes=2**stage) for stage in range(schedule.stages)]
    timeline = simulate(lowered, costs)
    plain = memory(schedule, costs, timeline)
    for rank, course in enumerate(memory(lowered, costs, timeline)):
        held, counted = 0, [0]
        moments = {span.action: (span.start_seconds + span.end_seconds) / 2 for span in timeline.spans(rank)}
        for action in lowered.rows[rank]:
            if action.op in (Op.UNSHARD, Op.RESHARD):
                held += 2**action.stage if action.op is Op.UNSHARD else -(2**action.stage)
                counted.append(held)
            elif action.op.is_compute:
                before = [size for s, size in zip(course.seconds, course.unsharded, strict=True) if s < moments[action]]
                assert before[-1] == held
        assert course.peak_unsharded == max(counted)
        assert course.peak_activations == plain[rank].peak_activations
        assert course.peak <= course.peak_activations + course.peak_unsharded
        assert plain[rank].peak_unsharded == 0


@given(schedules)
def test_messages_and_reductions_hold_nothing_and_in_units_it_is_what_check_counts(schedule: Schedule) -> None:
    cost = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=1)
    timeline = simulate(schedule, cost)
    assert [course.peak_activations for course in memory(schedule, cost, timeline)] == peak_activations(schedule)
    lowered = reduce_ties(add_communication(schedule), [range(schedule.stages)])
    assert memory(lowered, cost, timeline) == memory(schedule, cost, timeline)


def test_lines_of_one_rank_by_hand() -> None:
    schedule = Schedule.parse("x: 2 microbatches, stages on ranks 0\nrank 0: 0F0 0I0 0F1 0W0 0I1 0W1")
    cost = StageCost(2, 3, 4, 0, 10, 4, parameter_bytes=100, gradient_bytes=50, optimizer_bytes=200)
    (found,) = memory(schedule, cost, simulate(schedule, cost))
    assert (found.parameters, found.gradients, found.optimizer) == (100, 50, 200)
    assert list(zip(found.seconds, found.activations, strict=True)) == [
        (0, 10), (5, 4), (5, 14), (11, 10), (14, 4), (18, 0),
    ]  # fmt: skip
    assert (found.peak_activations, found.peak) == (14, 364)
    with pytest.raises(ArgumentError, match="3 costs for 1 stages"):
        memory(schedule, [cost] * 3, simulate(schedule, cost))


def test_one_long_microbatch_with_much_to_keep() -> None:
    schedule = generate("gpipe", 1, 3)
    small, large = StageCost(1, 1, 0, activation_bytes=1), StageCost(5, 5, 0, activation_bytes=10)
    timeline = simulate(schedule, [[small, large, small]])
    assert list(timeline.tracks[0].end) == [1, 6, 7, 8, 13, 14]
    (found,) = memory(schedule, [[small, large, small]], timeline)
    held = [(0, 1), (1, 11), (6, 12), (8, 11), (13, 1), (14, 0)]
    assert list(zip(found.seconds, found.activations, strict=True)) == held
    assert peaks(schedule, [[small, large, small]], timeline)[0].activations == 12


def test_a_real_run_is_measured_by_its_own_clock() -> None:
    schedule = Schedule.parse("x: 1 microbatch, stages on ranks 0\nrank 0: 0RECV_B0 0F0 0SEND_F0 0B0")
    row = [(action, 10 * n, 10 * n, 10 * n + 10) for n, action in enumerate(schedule.rows[0])]
    cost = StageCost(1, 1, 1, activation_bytes=5)
    (found,) = memory(schedule, cost, from_nanoseconds([row]))
    assert (found.seconds, found.activations) == ((10e-9, 40e-9), (5, 0))

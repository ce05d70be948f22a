"""The simulation's loop gives the same compiled and in plain Python, to the bit; and what else large schedules need."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ScheduleError
from penstock.schedule import Schedule, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, critical_path, event_loop, idle_time_by_cause, memory, peaks, simulate
from penstock.simulate.costs import LinkCost
from scaffolding.some_schedules import small_ones, with_overlaps

pytest.importorskip("numba")

seconds = st.floats(0, 10)
stage_costs = st.builds(
    StageCost, seconds, seconds, seconds, output_bytes=seconds, overlapped_seconds=st.one_of(st.none(), seconds)
)


def looped(nodes: int, schedule: Schedule, costs: list[StageCost], link: LinkCost) -> Timeline | str:
    """Simulated with the compiled loop from so many nodes on."""
    with mock.patch.multiple(event_loop, LARGE=nodes, _loaded=False):
        try:
            return simulate(schedule, costs, link)
        except ScheduleError as error:
            return str(error)


@settings(max_examples=60)
@given(small_ones(), st.data())
def test_compiled_and_not_are_the_same_to_the_bit(schedule: Schedule, data: st.DataObject) -> None:
    schedule = with_overlaps(schedule, iter(lambda: data.draw(st.booleans()), None))
    costs = data.draw(st.lists(stage_costs, min_size=schedule.stages, max_size=schedule.stages))
    link = LinkCost(data.draw(seconds), data.draw(st.floats(0.1, 5)))
    assert looped(0, schedule, costs, link) == looped(10**9, schedule, costs, link)


def test_large_schedules_are_compiled_and_small_ones_are_not() -> None:
    with mock.patch.object(event_loop, "_loaded", False):
        assert event_loop.compiled_run(event_loop.LARGE - 1) is None
        assert event_loop.compiled_run(event_loop.LARGE) is not None
        assert event_loop.compiled_run(1) is not None, "what has been loaded is quicker"


def test_without_numba_everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "_compiled", lambda: None)
    schedule = generate("1f1b", 8, 4096)
    assert sum(map(len, schedule.rows)) > event_loop.LARGE
    assert simulate(schedule, StageCost(1, 1, 1)).makespan_seconds == (4096 + 7) * 3


def test_more_nodes_than_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few ranks at a time: what one part waits for may be in another."""
    schedule, costs = generate("interleaved-1f1b", 5, 7, 2), [StageCost(1 + s, 2, 1, 3) for s in range(10)]
    whole = simulate(schedule, costs, LinkCost(0.25, 4))
    found = idle_time_by_cause(schedule, whole), critical_path(schedule, whole)
    monkeypatch.setattr("penstock.simulate.computations._NODES_PER_PART", 30)
    assert simulate(schedule, costs, LinkCost(0.25, 4)) == whole
    assert (idle_time_by_cause(schedule, whole), critical_path(schedule, whole)) == found


@settings(max_examples=50)
@given(small_ones(), st.data())
def test_peaks_are_those_of_the_courses(schedule: Schedule, data: st.DataObject) -> None:
    whole = st.integers(0, 9)
    costs = [
        StageCost(1, 1, 1, 0, 9, data.draw(whole), data.draw(whole), data.draw(whole), data.draw(whole))
        for _ in range(schedule.stages)
    ]
    timeline = simulate(schedule, costs)
    assert [
        (one.parameters, one.gradients, one.optimizer, one.activations, one.unsharded, one.at_once)
        for one in peaks(schedule, costs, timeline)
    ] == [
        (one.parameters, one.gradients, one.optimizer, one.peak_activations, one.peak_unsharded, one.peak)
        for one in memory(schedule, costs, timeline)
    ]

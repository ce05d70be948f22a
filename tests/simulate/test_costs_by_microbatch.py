"""Costs that differ by microbatch, and memory by hand; test_costs_and_links.py has such costs, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock._base.errors import ArgumentError
from penstock.schedule import Placement, Schedule, generate
from penstock.simulate import StageCost, memory, peaks, simulate
from penstock.simulate.costs import LinkCost
from penstock.simulate.search import search


def test_the_same_for_every_microbatch_is_one_cost() -> None:
    for schedule in (generate("dualpipe", 4, 8), generate("zb-h1", 3, 5)):
        cost = StageCost(1.5, 2, 1, 3, 7, 2, 1, 1, 2, 3.75)
        link = LinkCost(0.25, 4)
        one, each = [cost] * schedule.stages, [[cost] * schedule.microbatches] * schedule.stages
        timeline = simulate(schedule, one, link)
        assert simulate(schedule, each, link) == timeline
        assert memory(schedule, each, timeline) == memory(schedule, one, timeline)


def test_two_that_overlap_take_what_the_forwards_microbatch_says() -> None:
    schedule = Schedule.parse(
        "x: 3 microbatches, stages on ranks 0\nrank 0: 0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2"
    )
    cost = StageCost(1, 2, 0)
    costs = [[cost, replace(cost, overlapped_seconds=2.5), cost]]
    assert list(simulate(schedule, costs).tracks[0].end)[2::2] == [3.5, 6.5]


def test_one_long_microbatch_with_much_to_keep() -> None:
    schedule = generate("gpipe", 1, 3)
    small, large = StageCost(1, 1, 0, activation_bytes=1), StageCost(5, 5, 0, activation_bytes=10)
    timeline = simulate(schedule, [[small, large, small]])
    assert list(timeline.tracks[0].end) == [1, 6, 7, 8, 13, 14]
    (found,) = memory(schedule, [[small, large, small]], timeline)
    held = [(0, 1), (1, 11), (6, 12), (8, 11), (13, 1), (14, 0)]
    assert list(zip(found.seconds, found.activations, strict=True)) == held
    assert peaks(schedule, [[small, large, small]], timeline)[0].activations == 12


def test_what_does_not_fit_is_refused() -> None:
    schedule, cost = generate("1f1b", 2, 4), StageCost(1, 1, 1)
    with pytest.raises(ArgumentError, match="stage 1 has 3 costs for 4 microbatches; pass one, or one for each"):
        simulate(schedule, [cost, [cost] * 3])
    with pytest.raises(ArgumentError, match="stage 0: parameter_bytes is not the same for all microbatches"):
        simulate(schedule, [[cost, cost, cost, replace(cost, parameter_bytes=1)], cost])
    with pytest.raises(ArgumentError, match="the search takes one for each stage"):
        search(Placement.loop(2), 4, [cost, [cost] * 4], seconds=1)  # type: ignore[list-item]

"""The cuts are the best there are: compared with all cuts of small instances."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ArgumentError
from penstock.costs import CutProblem, best_cuts, stage_bytes, stage_loads

SMALL = st.integers(0, 9)


@st.composite
def problems(draw: st.DrawFn) -> tuple[CutProblem, int]:
    units = draw(st.integers(1, 8))
    stages = draw(st.integers(1, units))

    def column() -> list[int]:
        return draw(st.lists(SMALL, min_size=units, max_size=units))

    limit = draw(st.one_of(st.just(float("inf")), st.integers(0, 60)))
    balanced = draw(st.sampled_from(["seconds", "bytes"]))
    in_flight = draw(st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    held, pair = (
        column(),
        draw(st.lists(st.integers(0, units - 1), min_size=2, max_size=2, unique=True)) if units > 1 else [],
    )
    ties = [(min(pair), max(pair), held[max(pair)])] if pair else []
    more: dict[str, Any] = {"working_bytes": column(), "ties": ties} if draw(st.booleans()) else {}
    if balanced == "seconds" and draw(st.booleans()):
        waiting = draw(st.lists(st.integers(0, 5), min_size=stages, max_size=stages))
        more |= {"again_seconds": column(), "received_bytes": column(), "waiting_bytes": column(), "waiting": waiting}
    return CutProblem(column(), column(), held, column(), in_flight, limit, balanced, **more), stages


def by_hand(problem: CutProblem, starts: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Each stage's cost and memory, from their definitions."""
    costs, sizes = [], []
    units = len(problem.seconds)
    for stage, (start, end) in enumerate(pairwise((*starts, units))):
        kept = problem.in_flight[stage] * sum(problem.activation_bytes[start:end])
        twice = sum(size for one, other, size in problem.ties if start <= one and other < end)
        later = [sum(problem.activation_bytes[unit + 1 : end]) for unit in range(start, end)]  # not there yet, or gone
        working = max(
            (most - gone for most, gone in zip(problem.working_bytes[start:end], later, strict=False)), default=0
        )
        always = sum(problem.held_bytes[start:end]) - twice + max(working, 0)
        crossing = sum(problem.crossing_seconds[cut] for cut in (start, end) if 0 < cut < units)
        seconds, size = sum(problem.seconds[start:end]) + crossing, always + kept
        if problem.again_seconds and size > problem.limit_bytes:
            seconds += sum(problem.again_seconds[start:end])
            waits = problem.waiting[stage] * sum(problem.waiting_bytes[start:end])
            received = problem.in_flight[stage] * problem.received_bytes[start]
            size = always + sum(problem.activation_bytes[start:end]) + waits + received
        sizes.append(size)
        costs.append(size if problem.balanced == "bytes" else seconds)
    return costs, sizes


@given(problems())
def test_no_cut_is_better(case: tuple[CutProblem, int]) -> None:
    problem, stages = case
    every = [by_hand(problem, (0, *cuts)) for cuts in combinations(range(1, len(problem.seconds)), stages - 1)]
    fitting = [costs for costs, sizes in every if max(sizes) <= problem.limit_bytes]
    if not fitting:
        least = min(max(sizes) for _, sizes in every)
        with pytest.raises(
            ArgumentError,
            match=rf"no cut into {stages} stages fits. The best one needs {least:,.0f} bytes"
            if not problem.again_seconds
            else "fits",
        ):
            best_cuts(problem, stages)
        return
    starts = best_cuts(problem, stages)
    costs, sizes = by_hand(problem, tuple(starts))
    if not problem.again_seconds:
        assert (stage_loads(problem, starts), stage_bytes(problem, starts)) == (costs, sizes)
    assert max(sizes) <= problem.limit_bytes
    assert max(costs) == min(map(max, fitting))
    even = [sum(c * c for c in other) for other in fitting if max(other) == max(costs)]
    assert sum(c * c for c in costs) == min(even)


def test_the_first_stage_of_1f1b_gets_less_where_memory_is_short() -> None:
    freely = CutProblem([1.0] * 8, activation_bytes=[1] * 8, in_flight=[4, 3, 2, 1])
    assert best_cuts(freely, 4) == [0, 2, 4, 6]
    tight = CutProblem([1.0] * 8, activation_bytes=[1] * 8, in_flight=[4, 3, 2, 1], limit_bytes=6)
    assert best_cuts(tight, 4) == [0, 1, 3, 6]


def test_a_cut_moves_to_where_less_crosses() -> None:
    assert best_cuts(CutProblem([2.0] * 4, [0, 1, 5, 3]), 2) == [0, 1]
    assert best_cuts(CutProblem([2.0] * 4), 2) == [0, 2]


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(ArgumentError, match="stages=3: expected from 1 to 2"):
        best_cuts(CutProblem([1.0, 1.0]), 3)

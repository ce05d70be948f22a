"""Simulated steps with something wrong, planted, and the same step without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.plan.explain import Event, TraceData
from penstock.schedule import generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate

LINK = LinkCost(0.02)


def timeline(
    forward: Callable[[int, int], float],
    backward: Callable[[int, int], float],
    ranks: int = 4,
    microbatches: int = 8,
    schedule: str = "1f1b",
    link: LinkCost = LINK,
) -> Timeline:
    """A step whose F and B take what these say, by stage and microbatch."""
    made = generate(schedule, ranks, microbatches)
    costs = [
        [StageCost(forward(stage, k), backward(stage, k), 0.0) for k in range(microbatches)]
        for stage in range(made.stages)
    ]
    return simulate(made, costs, link)


def recorded(*replicas: Timeline, ahead: dict[int, float] | None = None) -> TraceData:
    """One step of these replicas; `ahead`: by how much ranks' clocks are ahead of the first's."""
    ahead = ahead or {}
    events = [
        Event(
            (number, span.rank),
            str(span.action),
            span.start_seconds + ahead.get(span.rank, 0.0),
            span.end_seconds + ahead.get(span.rank, 0.0),
            span.action,
            0,
            span.rank,
            number,
        )
        for number, one in enumerate(replicas)
        for span in one
    ]
    return TraceData(tuple(events))


def without(recording: TraceData, keep: Callable[[Event], bool]) -> TraceData:
    return replace(recording, events=tuple(event for event in recording.events if keep(event)))


def even(stage: int, microbatch: int) -> float:
    return 1.0


def twice(stage: int, microbatch: int) -> float:
    return 2.0

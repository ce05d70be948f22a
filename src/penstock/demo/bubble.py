"""The bubble three ways: measured, simulated from measured times, and by the textbook formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from penstock.schedule import Op, Schedule, generators
from penstock.schedule.timeline import Timeline
from penstock.simulate import simulate
from penstock.simulate.costs import StageCost


@dataclass(frozen=True, slots=True)
class Bubble:
    """The share of the time in which ranks wait, determined three ways.

    Attributes:
        measured: the median over the timed steps.
        simulated: for the same schedule, with each stage's measured times and messages that take no time.
        textbook: for the same schedule, if all stages took the same time.
        formula: the textbook's, in p ranks and m microbatches; empty if the schedule has none.
    """

    measured: float
    simulated: float
    textbook: float
    formula: str


def compare(schedule: Schedule, timelines: Sequence[Timeline]) -> Bubble:
    """Compares the bubble of a few timed steps with its predictions."""
    formulas = {generator.name: generator.bubble or "" for generator in generators()}
    return Bubble(
        median(timeline.bubble_rate for timeline in timelines),
        simulate(schedule, stage_costs(schedule, timelines)).bubble_rate,
        simulate(schedule, StageCost(1.0, 1.0, 1.0)).bubble_rate,
        formulas.get(schedule.name, ""),
    )


def stage_costs(schedule: Schedule, timelines: Sequence[Timeline]) -> list[StageCost]:
    """The mean time of each stage's forward and backward, in seconds."""
    seconds: dict[tuple[int, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline:
            seconds.setdefault((span.action.stage, span.action.op), []).append(span.end_seconds - span.start_seconds)

    def mean(stage: int, *ops: Op) -> float:
        return sum(fmean(seconds[stage, op]) for op in ops if (stage, op) in seconds)

    # A full backward is counted as I: the simulated time of B is the sum of I and W.
    return [
        StageCost(mean(stage, Op.F), mean(stage, Op.B, Op.I), mean(stage, Op.W)) for stage in range(schedule.stages)
    ]

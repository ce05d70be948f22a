"""The bubble, three times: as measured, as simulated with the measured times, and by the textbook."""

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
    """Shares of the time in which ranks wait.

    Attributes:
        measured: the median over the timed steps.
        simulated: of the same schedule, where each stage takes the time that it took here and messages take none.
        textbook: where all stages take the same time.
        formula: of the textbook's, of p ranks and m microbatches; empty if the schedule has none.
    """

    measured: float
    simulated: float
    textbook: float
    formula: str


def compare(schedule: Schedule, timelines: Sequence[Timeline]) -> Bubble:
    """What the timelines of a few steps of one schedule say of its bubble."""
    formulas = {generator.name: generator.bubble or "" for generator in generators()}
    return Bubble(
        median(timeline.bubble_rate for timeline in timelines),
        simulate(schedule, stage_costs(schedule, timelines)).bubble_rate,
        simulate(schedule, StageCost(1.0, 1.0, 1.0)).bubble_rate,
        formulas.get(schedule.name, ""),
    )


def stage_costs(schedule: Schedule, timelines: Sequence[Timeline]) -> list[StageCost]:
    """The mean seconds of each stage's forward and backward."""
    seconds: dict[tuple[int, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline:
            seconds.setdefault((span.action.stage, span.action.op), []).append(span.end_seconds - span.start_seconds)

    def mean(stage: int, *ops: Op) -> float:
        return sum(fmean(seconds[stage, op]) for op in ops if (stage, op) in seconds)

    # A whole backward counts as one of the inputs; the simulation of B takes the sum of both.
    return [
        StageCost(mean(stage, Op.F), mean(stage, Op.B, Op.I), mean(stage, Op.W)) for stage in range(schedule.stages)
    ]

"""The result of a search, as checked and timed by the library itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock._base.errors import ScheduleError
from penstock.schedule import Schedule, check
from penstock.schedule.timeline import Timeline
from penstock.simulate import Links, simulate
from penstock.simulate.costs import StageCost
from penstock.simulate.search.problem import Objective


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule found.

    Attributes:
        schedule: F, I and W only (or a generator's own schedule, if its overlaps make it the best); without messages.
        timeline: as `penstock.simulate` times it.
        objective: what was minimized.
        objective_seconds: its value.
        lower_bound_seconds: no schedule can be better.
        known: the best generator that fits, by name; None if none does.
        known_seconds: its objective; infinite if there is none.
        search_seconds: how long the search took.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    objective_seconds: float
    lower_bound_seconds: float
    known: str | None
    known_seconds: float
    search_seconds: float

    @property
    def gap(self) -> float:
        """How much worse it is than the lower bound, as a share of the bound. 0: it is optimal."""
        bound = self.lower_bound_seconds
        return max(0.0, self.objective_seconds / bound - 1.0) if bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether it is optimal: as good as the lower bound, up to rounding."""
        return self.gap <= 1e-6


def judged(
    schedule: Schedule, costs: StageCost | Sequence[StageCost], links: Links, objective: Objective
) -> tuple[Timeline, float]:
    """The timeline and the objective of a schedule that was found. Raises ScheduleError if it is illegal."""
    if broken := check(schedule):
        raise ScheduleError(f"the search made a schedule that is not legal, which is a defect of it: {broken[0]}")
    return timed(schedule, costs, links, objective)


def timed(
    schedule: Schedule, costs: StageCost | Sequence[StageCost], links: Links, objective: Objective
) -> tuple[Timeline, float]:
    """The timeline and the objective of a schedule that is known to be legal."""
    timeline = simulate(schedule, costs, links)
    return timeline, timeline.makespan_seconds if objective == "makespan" else timeline.span_seconds

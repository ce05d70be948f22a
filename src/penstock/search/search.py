"""Costs, placement and memory -> the best schedule found: patterns first, single actions last.

1. Every generator that has the placement and fits in memory is timed. The answer is never worse.
2. Patterns are dispatched: those that the generators repeat, others at random, and then changes to the best. A pattern
   is the same for any number of microbatches, so where there are many, it is looked for with fewer.
3. The best rows are improved by moving single actions.

It ends as soon as the lower bound is met.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from penstock.costs import StageCost
from penstock.errors import ArgumentError, ScheduleError
from penstock.schedule import Placement, Schedule, check
from penstock.search.bounds import lower_bound
from penstock.search.climb import Candidate, climb
from penstock.search.dispatch import Pattern
from penstock.search.improve import improve
from penstock.search.known import known_schedules, one_by_one
from penstock.search.pattern import pattern_of
from penstock.search.problem import Objective, Problem, Rows, problem
from penstock.search.timing import time_rows
from penstock.simulate import NO_COST, Links, simulate
from penstock.timeline import Timeline

_DISPATCH_SECONDS = 2.2e-6  # nominal, an action: how many steps a time budget is worth does not depend on the machine
_MOVE_SECONDS = 0.7e-6
_OVERHEAD_ACTIONS = 40  # what a step costs besides its actions
_PATTERN_SHARE, _FULL_SHARE = 0.5, 0.1  # of the budget: for patterns, and for those with all microbatches
_SAMPLES = 200  # random patterns, at most
_FEW_A_RANK = 4  # microbatches: enough for a beginning, a steady state and an end
_STARTS = 4  # rows that are improved
_MET = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule that was found.

    Attributes:
        schedule: of F, I and W (or a generator's own, where its overlaps make it the best); without messages.
        timeline: as `penstock.simulate` times it.
        objective: what was made small.
        objective_seconds: how small it is.
        lower_bound_seconds: no schedule can be better.
        known: the best generator that fits, by name; None if none does.
        known_seconds: its objective; infinite if there is none.
        search_seconds: how long the search took.
        cut_off: whether the time was over before all steps were done, so that another run may find something else.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    objective_seconds: float
    lower_bound_seconds: float
    known: str | None
    known_seconds: float
    search_seconds: float
    cut_off: bool

    @property
    def gap(self) -> float:
        """How much worse than the lower bound it is, as a share of the bound. 0: it is optimal."""
        bound = self.lower_bound_seconds
        return max(0.0, self.objective_seconds / bound - 1.0) if bound else 0.0


def search(
    placement: Placement,
    microbatches: int,
    costs: StageCost | Sequence[StageCost],
    links: Links = NO_COST,
    *,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    seconds: float = 5.0,
    seed: int = 0,
) -> Found:
    """The best schedule that it can find within a memory limit and a time.

    Backwards are split into I and W, and microbatches ascend on every pass of every stage. The same arguments give the
    same answer: `seconds` is turned into a number of steps that a slow machine does in that time. Only a machine that
    is slower still is cut off by the clock, and `Found.cut_off` says so.

    Args:
        placement: which rank owns which stage.
        microbatches: how many.
        costs: of every stage, or one for each. With several pipelines, of every stage of one, or of all.
        links: between any two ranks, or by (rank that sends, rank that receives).
        memory_limit: the most that a rank may hold in activations, or one for each rank, in the unit of
            `StageCost.activation_bytes`; where these are all 0, in activations of one microbatch on one stage, each
            held until W. None: there is no limit.
        objective: "makespan", the last end from 0; or "span", the largest, over ranks, from first F to last end.
        seconds: how long it may take, about.
        seed: of its random choices.

    Raises:
        ArgumentError: an argument is wrong, or not one microbatch fits in a rank's memory limit.
    """
    began = time.monotonic()
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ArgumentError(f"seconds={seconds!r}: expected a time above 0")
    asked = problem(placement, microbatches, costs, links, memory_limit, objective)
    bound = lower_bound(asked)
    known = known_schedules(asked, costs, links)
    best = min(known, key=lambda entry: entry.seconds, default=None)
    clock = _Clock(began + seconds)
    cost, rows = _best_rows(asked, [e.rows for e in known if e.rows], bound, seconds, Random(seed), clock)
    schedule = asked.schedule("search", rows)
    if best is not None and best.seconds <= cost:
        schedule = best.schedule
    if broken := check(schedule):
        raise ScheduleError(f"the search made a schedule that is not legal, which is a defect of it: {broken[0]}")
    timeline = simulate(schedule, costs, links)
    return Found(
        schedule,
        timeline,
        objective,
        timeline.makespan_seconds if objective == "makespan" else timeline.span_seconds,
        bound,
        best.schedule.name if best else None,
        best.seconds if best else math.inf,
        time.monotonic() - began,
        clock.over,
    )


class _Clock:
    """Whether it is time to stop: at the deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.over = False

    def until(self, target: float) -> Callable[[float], bool]:
        """Whether to stop with an objective: it is as good as `target`, or the time is over."""

        def done(cost: float) -> bool:
            if cost <= target * _MET:
                return True
            self.over = self.over or time.monotonic() > self._deadline
            return self.over

        return done


def _best_rows(
    asked: Problem, known: list[Rows], bound: float, seconds: float, random: Random, clock: _Clock
) -> tuple[float, Rows]:
    """The best objective, and its rows."""
    done = clock.until(bound)
    pool, patterns = [], []
    for rows in [*known, one_by_one(asked)]:
        timing = time_rows(asked, rows)
        if timing is not None:
            pool.append((timing.cost, timing.score, rows))
            patterns.append(pattern_of(asked, rows, timing))
    if not done(min(pool)[0]):
        for candidate in _climbed(asked, patterns, bound, seconds, random, clock):
            pool.append((candidate.cost, candidate.score, candidate.rows))
    pool.sort(key=lambda entry: entry[:2])
    improved = [(cost, rows) for cost, _, rows in pool[:_STARTS]]
    steps = _steps(asked, seconds * (1 - _PATTERN_SHARE - _FULL_SHARE), _MOVE_SECONDS)
    # Each start gets a little of the time, and the best one the rest.
    for share, starts in ((2 / 3 / len(improved), len(improved)), (1 / 3, 1)):
        improved.sort(key=lambda entry: entry[0])
        for i, (_, rows) in enumerate(improved[:starts]):
            if not done(min(improved, key=lambda entry: entry[0])[0]):
                improved[i] = improve(asked, rows, random, int(steps * share), done)
    return min(improved, key=lambda entry: entry[0])


def _climbed(
    asked: Problem, patterns: list[Pattern], bound: float, seconds: float, random: Random, clock: _Clock
) -> list[Candidate]:
    """The best patterns' candidates: looked for with fewer microbatches where there are many."""
    few = asked.with_microbatches(min(asked.microbatches, _FEW_A_RANK * asked.ranks * asked.placement.pipelines))
    steps = _steps(few, seconds * _PATTERN_SHARE, _DISPATCH_SECONDS)
    samples = min(_SAMPLES, steps // 3)
    done = clock.until(bound if few == asked else lower_bound(few))
    found = climb(few, patterns, samples, steps - samples, random, done)
    steps = _steps(asked, seconds * _FULL_SHARE, _DISPATCH_SECONDS)
    return climb(asked, [candidate.pattern for candidate in found], 0, steps, random, clock.until(bound))


def _steps(problem: Problem, seconds: float, action_seconds: float) -> int:
    return max(1, int(seconds / (action_seconds * (problem.actions + _OVERHEAD_ACTIONS))))

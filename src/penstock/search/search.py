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
from random import Random

from penstock.costs import StageCost
from penstock.errors import ArgumentError
from penstock.schedule import Placement
from penstock.search.bounds import lower_bound
from penstock.search.climb import Candidate, climb
from penstock.search.dispatch import Pattern
from penstock.search.found import Found, judged
from penstock.search.improve import improve
from penstock.search.known import known_schedules, one_by_one
from penstock.search.pattern import pattern_of
from penstock.search.problem import Objective, Problem, Rows, problem
from penstock.search.timing import time_rows
from penstock.simulate import NO_COST, Links

_DISPATCH_SECONDS = 2.2e-6  # nominal, an action: how many steps a time budget is worth does not depend on the machine
_MOVE_SECONDS = 0.25e-6
_OVERHEAD_ACTIONS = 40  # what a step costs besides its actions
_PATTERN_SHARE, _FULL_SHARE = 0.5, 0.1  # of the budget: for patterns, and for those with all microbatches
_SAMPLES = 200  # random patterns, at most
_FEW_A_RANK = 4  # microbatches: enough for a beginning, a steady state and an end
_STARTS = 4  # rows that are improved
_REPEATS = 2  # times that the best of them is improved again
_MET = 1 + 1e-9


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
    asked = problem(placement, microbatches, costs, links, memory_limit=memory_limit, objective=objective)
    bound = lower_bound(asked)
    known = known_schedules(asked, costs, links)
    best = min(known, key=lambda entry: entry.seconds, default=None)
    clock = _Clock(began, seconds)
    cost, rows = _best_rows(asked, [e.rows for e in known if e.rows], bound, seconds, Random(seed), clock)
    schedule = asked.schedule("search", rows)
    if best is not None and best.seconds <= cost:
        schedule = best.schedule
    timeline, objective_seconds = judged(schedule, costs, links, objective)
    return Found(
        schedule=schedule,
        timeline=timeline,
        objective=objective,
        objective_seconds=objective_seconds,
        lower_bound_seconds=bound,
        known=best.schedule.name if best else None,
        known_seconds=best.seconds if best else math.inf,
        search_seconds=time.monotonic() - began,
        cut_off=clock.over,
    )


class _Clock:
    """When to stop."""

    def __init__(self, began: float, seconds: float) -> None:
        self._began, self._seconds = began, seconds
        self.over = False

    def until(self, target: float, share: float) -> Callable[[float], bool]:
        """Whether to stop with an objective: it is as good as `target`, or a share of the time has gone."""
        deadline = self._began + self._seconds * share

        def done(cost: float) -> bool:
            if cost <= target * _MET:
                return True
            if time.monotonic() > deadline:
                self.over = True
                return True
            return False

        return done


def _best_rows(
    asked: Problem, known: list[Rows], bound: float, seconds: float, random: Random, clock: _Clock
) -> tuple[float, Rows]:
    """The best objective, and its rows."""
    pool, patterns = [], []
    for rows in [*known, one_by_one(asked)]:
        timing = time_rows(asked, rows)
        if timing is not None:
            pool.append((timing.cost, timing.score, rows))
            patterns.append(pattern_of(asked, rows, timing))
    if min(pool)[0] > bound * _MET:
        for candidate in _climbed(asked, patterns, bound, seconds, random, clock):
            pool.append((candidate.cost, candidate.score, candidate.rows))
    pool.sort(key=lambda entry: entry[:2])
    return _improved(asked, [(cost, rows) for cost, _, rows in pool[:_STARTS]], bound, seconds, random, clock)


def _climbed(
    asked: Problem, patterns: list[Pattern], bound: float, seconds: float, random: Random, clock: _Clock
) -> list[Candidate]:
    """The best patterns' candidates: looked for with fewer microbatches where there are many."""
    few = asked.with_microbatches(min(asked.microbatches, _FEW_A_RANK * asked.ranks * asked.placement.pipelines))
    steps = _steps(few, seconds * _PATTERN_SHARE, _DISPATCH_SECONDS)
    samples = min(_SAMPLES, steps // 3)
    done = clock.until(bound if few == asked else lower_bound(few), _PATTERN_SHARE)
    found = climb(few, patterns, samples, steps - samples, random, done)
    steps = _steps(asked, seconds * _FULL_SHARE, _DISPATCH_SECONDS)
    done = clock.until(bound, _PATTERN_SHARE + _FULL_SHARE)
    return climb(asked, [candidate.pattern for candidate in found], 0, steps, random, done)


def _improved(
    asked: Problem, starts: list[tuple[float, Rows]], bound: float, seconds: float, random: Random, clock: _Clock
) -> tuple[float, Rows]:
    """Each start gets some of the time, and the best of them the rest."""
    spent = _PATTERN_SHARE + _FULL_SHARE
    steps = _steps(asked, seconds * (1 - spent), _MOVE_SECONDS)
    shares = [0.6 / len(starts)] * len(starts) + [0.4 / _REPEATS] * _REPEATS
    best = min(starts, key=lambda entry: entry[0])
    for i, share in enumerate(shares):
        spent += share * (1 - _PATTERN_SHARE - _FULL_SHARE)
        done = clock.until(bound, spent)
        if best[0] <= bound * _MET:
            break
        rows, heat = (starts[i][1], 1.0) if i < len(starts) else (best[1], 0.5)
        best = min(best, improve(asked, rows, random, int(steps * share), done, heat), key=lambda entry: entry[0])
    return best


def _steps(problem: Problem, seconds: float, action_seconds: float) -> int:
    return max(1, int(seconds / (action_seconds * (problem.actions + _OVERHEAD_ACTIONS))))

"""Costs, placement and memory -> the best schedule found: patterns first, single actions last.

1. Every generator with this placement that fits in memory is timed, and the published heuristics. The answer is never
   worse.
2. Patterns are dispatched: regular ones, those that the generators repeat, others at random, and then changes to the
   best.
3. The best rows are improved by moving single actions.
4. If there are many microbatches, all this is done with fewer, and what the best rows repeat is repeated more often.

It ends as soon as the lower bound is met. What is tried, and in which order, does not depend on the available time:
steps 2 to 4 are repeated in rounds, each four times as long as the one before, up to a sufficient length, and the time
decides only where they end. So more time is never worse, and no clock is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from operator import attrgetter, itemgetter
from random import Random

from penstock._base.errors import ArgumentError
from penstock.schedule import Placement, schedule_specs
from penstock.simulate import NO_COST, Links
from penstock.simulate.costs import StageCost
from penstock.simulate.search.bounds import lower_bound
from penstock.simulate.search.improve import extrapolate, improve
from penstock.simulate.search.pattern import HEURISTIC, hill_climb, pattern_from_timing, regular
from penstock.simulate.search.problem import Objective, Problem, Rows, problem
from penstock.simulate.search.result import Baseline, SearchResult, evaluate, find_baselines, serial_rows
from penstock.simulate.search.timing import time_rows

# Nominal times, so that the number of steps does not depend on the machine.
_DISPATCH_SECONDS = 60e-6, 2.2e-6  # of a pattern, and of each of its actions
_TIMED_SECONDS = 0.33e-6  # of timing an action
_PATTERN_SHARE = 0.3  # of the time: for patterns; the remainder is for moves
_REGULAR_SHARE, _REGULAR_PATTERNS = 0.4, 192  # of the time, at most, and how many there are
_SMALL_SHARE = 0.8  # of the time: for fewer microbatches, if there are many
_SMALL_PER_RANK = 3  # microbatches: enough for a beginning, a steady state and an end
_PATTERNS = 1000  # in a round, at most: another round is worth more than more patterns
_FIRST_ROUND = 3.75 / 4**6  # seconds, so that the first seven rounds together take the five of the default
_GROWTH = 4.0
_SAMPLES = 0.2  # of the patterns: at random
_MOVES = (0.01, 0.8), (0.1, 0.8), (0.1, 0.01), (0.1, 0.1)  # heat, and reach as a share of a row: of each run
_STARTS = 2  # runs from different rows; the other runs go on from the best
_MIN_REACH = 3.0
_EXTRAPOLATED = 4  # of the best with fewer microbatches
_TOLERANCE = 1 + 1e-9

_Solution = tuple[float, Rows]
"""An objective, and the rows that have it."""


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
) -> SearchResult:
    """Search for the best schedule within a memory limit and an amount of work.

    Backwards are split into I and W, and microbatches ascend on every pass of every stage. The same arguments give the
    same answer: `seconds` is turned into a number of steps that take about that long on a usual machine, and other work
    beside it changes nothing; a slower machine takes longer.

    Args:
        placement: which rank owns which stage.
        microbatches: how many.
        costs: one for every stage, or one each. With several pipelines, for the stages of one, or of all.
        links: one cost between any two ranks, or costs by (sending rank, receiving rank).
        memory_limit: the most that a rank may hold in activations, or one for each rank, in the unit of
            `StageCost.activation_bytes`; if these are all 0, in activations of one microbatch on one stage, each held
            until W. None: no limit.
        objective: "makespan", the last end, counted from 0; or "span", the maximum over ranks of the time from first F
            to last end.
        seconds: how long it may take, roughly, not counting the generation of named schedules: some seconds more with
            dozens of ranks on a V.
        seed: of its random choices.

    Raises:
        ArgumentError: an argument is wrong, or a rank's memory limit has no room for even one microbatch.
    """
    began = time.monotonic()
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise ArgumentError(f"seconds={seconds!r}: expected a time above 0")
    if not isinstance(seed, int):
        raise ArgumentError(f"seed={seed!r}: expected an integer")
    search_problem = problem(placement, microbatches, costs, links, memory_limit=memory_limit, objective=objective)
    baselines = find_baselines(search_problem, costs, links)
    best = min(baselines, key=_seconds, default=None)
    names = {generator.name for generator in schedule_specs()}
    baseline = min((entry for entry in baselines if entry.schedule.name in names), key=_seconds, default=None)
    solver = _Solver(search_problem, lower_bound(search_problem), _Budget(seconds, seed))
    cost, rows = solver.solve(baselines, costs, links)
    with_overlaps = _with_overlaps(search_problem, costs)
    schedule = search_problem.schedule("search", rows)
    if best is not None and best.seconds <= cost:
        schedule = best.schedule
    timeline, objective_seconds = evaluate(schedule, costs, links, objective)
    return SearchResult(
        schedule=schedule,
        timeline=timeline,
        objective=objective,
        objective_seconds=objective_seconds,
        lower_bound_seconds=solver.bound if with_overlaps == search_problem else lower_bound(with_overlaps),
        baseline=baseline.schedule.name if baseline else None,
        baseline_seconds=baseline.seconds if baseline else math.inf,
        search_seconds=time.monotonic() - began,
    )


def _with_overlaps(problem: Problem, costs: StageCost | Sequence[StageCost]) -> Problem:
    """Return the problem with all actions as short as the shortest overlap could make them, which the bound allows
    for."""
    stage_costs = [costs] if isinstance(costs, StageCost) else costs
    overlaps = [cost.overlapped_seconds for cost in stage_costs if cost.overlapped_seconds is not None]
    serial = max(cost.forward_seconds for cost in stage_costs) + max(cost.backward_seconds for cost in stage_costs)
    if not overlaps or min(overlaps) >= serial:
        return problem
    return replace(problem, seconds=tuple(seconds * min(overlaps) / serial for seconds in problem.seconds))


class _Budget:
    """The remaining search time, in nominal seconds: in total, and in a round."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._remaining, self._round, self._seed = seconds, 0.0, seed
        self.random = Random(seed)

    @property
    def is_over(self) -> bool:
        return self._remaining <= 0

    def rounds(self, problem: Problem, share: float) -> Iterator[None]:
        """Start one round after another until time is up; `share` of each is for the problem."""
        longest = _PATTERNS * _pattern_seconds(problem) / (_PATTERN_SHARE * share)
        for number in count():
            if self.is_over:
                return
            self._round = min(_FIRST_ROUND * _GROWTH**number, longest)
            self.random = Random(f"{self._seed} {number}")
            yield

    def patterns(self, problem: Problem, share: float) -> int:
        """Return how many patterns a share of the round is worth; 0 if the remaining time is not enough for them."""
        pattern_seconds = _pattern_seconds(problem)
        patterns = max(1, int(self._round * share / pattern_seconds))
        self._remaining -= patterns * pattern_seconds
        return patterns if self._remaining > 0 else 0

    def regular(self, problem: Problem) -> int:
        """Return how many regular patterns a share of all the time is worth."""
        pattern_seconds = _pattern_seconds(problem)
        patterns = max(len(HEURISTIC), int(self._remaining * _REGULAR_SHARE / pattern_seconds))
        self._remaining -= min(patterns, _REGULAR_PATTERNS) * pattern_seconds
        return patterns

    def actions(self, share: float) -> tuple[float, float]:
        """Return how many actions can be timed in a share of the round, and in the total time left."""
        planned, remaining = self._round * share / _TIMED_SECONDS, max(0.0, self._remaining) / _TIMED_SECONDS
        self._remaining -= self._round * share
        return planned, remaining


def _pattern_seconds(problem: Problem) -> float:
    base, per_action = _DISPATCH_SECONDS
    return base + per_action * problem.actions


@dataclass(frozen=True, slots=True)
class _Solver:
    """Searches for the best rows: the problem, the bound that no rows can beat, and the time budget."""

    problem: Problem
    bound: float
    budget: _Budget

    def solve(self, baselines: list[Baseline], costs: StageCost | Sequence[StageCost], links: Links) -> _Solution:
        """Return the best objective, and its rows."""
        problem, budget = self.problem, self.budget
        initial = self.time_baselines(baselines)
        solutions = initial[:]
        if not self.is_met(initial):
            climbed = hill_climb(problem, islice(regular(problem), budget.regular(problem)), 0, 0, budget.random, 0.0)
            solutions += [(c.cost, c.rows) for c in climbed]
        small = problem.with_microbatches(
            min(problem.microbatches, _SMALL_PER_RANK * problem.ranks * problem.placement.pipelines)
        )
        solver = _Solver(small, lower_bound(small), budget)
        start = (
            []
            if small == problem or self.is_met(initial)
            else solver.time_baselines(find_baselines(small, costs, links))
        )
        for _ in budget.rounds(small, 1.0 if small == problem else _SMALL_SHARE):
            if self.is_met(solutions):
                break
            solutions += (
                self.explore(initial, 1.0) if small == problem else self.extrapolate_round(solver, start, solutions)
            )
        return min(solutions, key=_objective)

    def is_met(self, solutions: Sequence[_Solution]) -> bool:
        return min(solutions, key=_objective)[0] <= self.bound * _TOLERANCE

    def time_baselines(self, baselines: list[Baseline]) -> list[_Solution]:
        """Return the objectives of the known schedules that have rows, and of running one microbatch after another."""
        all_rows = [entry.rows for entry in baselines if entry.rows is not None]
        all_rows += [serial_rows(self.problem, last_first=last_first) for last_first in (False, True)]
        return [(timing.cost, rows) for rows in all_rows if (timing := time_rows(self.problem, rows)) is not None]

    def extrapolate_round(self, solver: _Solver, start: list[_Solution], solutions: list[_Solution]) -> list[_Solution]:
        """Search a round with fewer microbatches; return the solutions with the middle of their rows repeated."""
        small_is_met = solver.is_met(start)  # if so, there is nothing to gain with fewer
        explored = start if small_is_met else start + solver.explore(start, _SMALL_SHARE)
        if self.budget.is_over:  # with more time, a round that was cut short would have found other rows
            return []
        best = (rows for _, rows in sorted(explored, key=_objective)[:_EXTRAPOLATED])
        extended = [s for rows in best if (s := extrapolate(solver.problem, rows, self.problem)) is not None]
        if small_is_met:
            return extended + self.explore(solutions + extended, 1.0)
        return [*extended, self.improve_best(solutions + extended, 1.0 - _SMALL_SHARE)]

    def explore(self, solutions: list[_Solution], share: float) -> list[_Solution]:
        """Return other solutions from a share of a round; none if the remaining time is not enough for its patterns."""
        problem, patterns = self.problem, []
        if self.is_met(solutions) or not (steps := self.budget.patterns(problem, share * _PATTERN_SHARE)):
            return []
        for _, rows in solutions:
            timing = time_rows(problem, rows)
            assert timing is not None
            patterns.append(pattern_from_timing(problem, timing))
        samples = math.ceil(steps * _SAMPLES)
        climbed = hill_climb(problem, patterns, samples, steps - samples, self.budget.random, self.bound * _TOLERANCE)
        explored = [(candidate.cost, candidate.rows) for candidate in climbed]
        return [*explored, self.improve_best(solutions + explored, share * (1 - _PATTERN_SHARE))]

    def improve_best(self, solutions: list[_Solution], share: float) -> _Solution:
        """Return the best solution that moves reach, first from different solutions, then from the best so far."""
        problem, budget = self.problem, self.budget
        best = min(solutions, key=_objective)
        starts = sorted({cost: (cost, rows) for cost, rows in solutions}.values(), key=_objective)[:_STARTS]
        for run, (heat, reach) in enumerate(_MOVES):
            if self.is_met([best]) or budget.is_over:
                break
            actions, limit = budget.actions(share / len(_MOVES))
            _, rows = starts[run] if run < len(starts) else best
            reach = max(_MIN_REACH, reach * problem.actions / problem.ranks)
            target = self.bound * _TOLERANCE
            best = min(best, improve(problem, rows, budget.random, actions, limit, target, heat, reach), key=_objective)
        return best


_objective: Callable[[_Solution], float] = itemgetter(0)
_seconds: Callable[[Baseline], float] = attrgetter("seconds")

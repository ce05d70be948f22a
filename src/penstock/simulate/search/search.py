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
from penstock.simulate.figures import units_of_memory, with_activations
from penstock.simulate.search.bounds import lower_bound
from penstock.simulate.search.found import KnownSchedule, SearchResult, evaluate, known_schedules, one_by_one
from penstock.simulate.search.improve import extrapolate, improve
from penstock.simulate.search.pattern import HEURISTIC, hill_climb, pattern_of, regular
from penstock.simulate.search.problem import Objective, Problem, Rows, problem
from penstock.simulate.search.timing import time_rows

_DISPATCH_SECONDS = 60e-6, 2.2e-6  # nominal, of a pattern and of each of its actions: what a time is worth must not
_TIMED_SECONDS = 0.33e-6  # depend on the machine. And of an action that is timed
_PATTERN_SHARE = 0.3  # of the time: for patterns; the rest is for moves
_REGULAR_SHARE, _REGULAR = 0.4, 192  # of the time, at most, and how many there are
_FEW_SHARE = 0.8  # of the time: for fewer microbatches, if there are many
_FEW_A_RANK = 3  # microbatches: enough for a beginning, a steady state and an end
_PATTERNS = 1000  # in a round, at most: more are worth less than another round that starts afresh
_FIRST_ROUND = 3.75 / 4**6  # seconds, so that the first seven rounds together take the five of the default
_GROWTH = 4.0
_SAMPLES = 0.2  # of the patterns: at random
_MOVES = (0.01, 0.8), (0.1, 0.8), (0.1, 0.01), (0.1, 0.1)  # heat, and reach as a share of a row: of each run
_STARTS = 2  # runs from different rows; the other runs go on from the best
_LEAST_REACH = 3.0
_STRETCHED = 4  # of the best with fewer microbatches
_MET = 1 + 1e-9

_Answer = tuple[float, Rows]
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
    asked = problem(placement, microbatches, costs, links, memory_limit=memory_limit, objective=objective)
    known = known_schedules(asked, costs, links)
    best = min(known, key=_seconds, default=None)
    names = {generator.name for generator in schedule_specs()}
    named = min((entry for entry in known if entry.schedule.name in names), key=_seconds, default=None)
    question = _Question(asked, lower_bound(asked), _Budget(seconds, seed))
    cost, rows = question.best(known, costs, links)
    overlapped = _overlapped(asked, costs)
    schedule = asked.schedule("search", rows)
    if best is not None and best.seconds <= cost:
        schedule = best.schedule
    timeline, objective_seconds = evaluate(schedule, costs, links, objective)
    return SearchResult(
        schedule=schedule,
        timeline=timeline,
        objective=objective,
        objective_seconds=objective_seconds,
        lower_bound_seconds=question.bound if overlapped == asked else lower_bound(overlapped),
        baseline=named.schedule.name if named else None,
        baseline_seconds=named.seconds if named else math.inf,
        search_seconds=time.monotonic() - began,
    )


def search_within(
    activations: float | None,
    placement: Placement,
    microbatches: int,
    costs: Sequence[StageCost],
    links: Links,
    *,
    objective: Objective,
    seconds: float,
    seed: int = 0,
) -> SearchResult:
    """`search` with a limit in activations of one microbatch on all of a rank's stages, whatever their unit."""
    stages = [cost for cost in with_activations(placement, costs) if isinstance(cost, StageCost)]
    limit = None if activations is None else [activations * unit for unit in units_of_memory(placement, stages)]
    return search(
        placement,
        microbatches,
        stages,
        links,
        memory_limit=limit,
        objective=objective,
        seconds=seconds,
        seed=seed,
    )


def _overlapped(asked: Problem, costs: StageCost | Sequence[StageCost]) -> Problem:
    """Return the problem with all actions as short as the shortest overlap could make them, which the bound allows
    for."""
    given = [costs] if isinstance(costs, StageCost) else costs
    both = [cost.overlapped_seconds for cost in given if cost.overlapped_seconds is not None]
    apart = max(cost.forward_seconds for cost in given) + max(cost.backward_seconds for cost in given)
    if not both or min(both) >= apart:
        return asked
    return replace(asked, seconds=tuple(seconds * min(both) / apart for seconds in asked.seconds))


class _Budget:
    """What there is time for, in nominal seconds: in total, and in a round."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._left, self._round, self._seed = seconds, 0.0, seed
        self.random = Random(seed)

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def rounds(self, problem: Problem, share: float) -> Iterator[None]:
        """Begin one round after another until time is up; `share` of each is for the problem."""
        longest = _PATTERNS * _pattern_seconds(problem) / (_PATTERN_SHARE * share)
        for number in count():
            if self.is_over:
                return
            self._round = min(_FIRST_ROUND * _GROWTH**number, longest)
            self.random = Random(f"{self._seed} {number}")
            yield

    def patterns(self, problem: Problem, share: float) -> int:
        """Return how many patterns a share of the round is worth; 0 if the remaining time is not enough for them."""
        one = _pattern_seconds(problem)
        patterns = max(1, int(self._round * share / one))
        self._left -= patterns * one
        return patterns if self._left > 0 else 0

    def regular(self, problem: Problem) -> int:
        """Return how many regular patterns a share of all the time is worth."""
        one = _pattern_seconds(problem)
        patterns = max(len(HEURISTIC), int(self._left * _REGULAR_SHARE / one))
        self._left -= min(patterns, _REGULAR) * one
        return patterns

    def actions(self, share: float) -> tuple[float, float]:
        """Return how many actions can be timed in a share of the round, and in the total time left."""
        planned, most = self._round * share / _TIMED_SECONDS, max(0.0, self._left) / _TIMED_SECONDS
        self._left -= self._round * share
        return planned, most


def _pattern_seconds(problem: Problem) -> float:
    one, action = _DISPATCH_SECONDS
    return one + action * problem.actions


@dataclass(frozen=True, slots=True)
class _Question:
    """The question, the bound that no rows can beat, and what there is time for."""

    problem: Problem
    bound: float
    budget: _Budget

    def best(self, known: list[KnownSchedule], costs: StageCost | Sequence[StageCost], links: Links) -> _Answer:
        """Return the best objective, and its rows."""
        asked, budget = self.problem, self.budget
        first = self.timed(known)
        answers = first[:]
        if not self.is_met(first):
            found = hill_climb(asked, islice(regular(asked), budget.regular(asked)), 0, 0, budget.random, 0.0)
            answers += [(candidate.cost, candidate.rows) for candidate in found]
        few = asked.with_microbatches(min(asked.microbatches, _FEW_A_RANK * asked.ranks * asked.placement.pipelines))
        fewer = _Question(few, lower_bound(few), budget)
        begin = [] if few == asked or self.is_met(first) else fewer.timed(known_schedules(few, costs, links))
        for _ in budget.rounds(few, 1.0 if few == asked else _FEW_SHARE):
            if self.is_met(answers):
                break
            answers += self.found(first, 1.0) if few == asked else self.stretched(fewer, begin, answers)
        return min(answers, key=_objective)

    def is_met(self, answers: Sequence[_Answer]) -> bool:
        return min(answers, key=_objective)[0] <= self.bound * _MET

    def timed(self, known: list[KnownSchedule]) -> list[_Answer]:
        """Return the objectives of the known schedules that have rows, and of running one microbatch after another."""
        rows = [entry.rows for entry in known if entry.rows is not None]
        rows += [one_by_one(self.problem, last_first=last_first) for last_first in (False, True)]
        return [(timing.cost, one) for one in rows if (timing := time_rows(self.problem, one)) is not None]

    def stretched(self, fewer: _Question, begin: list[_Answer], answers: list[_Answer]) -> list[_Answer]:
        """Answers of a round that are found with fewer microbatches, whose middle is then repeated more often."""
        met = fewer.is_met(begin)  # if so, there is nothing to gain with fewer
        found = begin if met else begin + fewer.found(begin, _FEW_SHARE)
        if self.budget.is_over:  # what was cut short is not what more time would have stretched
            return []
        best = (rows for _, rows in sorted(found, key=_objective)[:_STRETCHED])
        made = [one for rows in best if (one := extrapolate(fewer.problem, rows, self.problem)) is not None]
        if met:
            return made + self.found(answers + made, 1.0)
        return [*made, self.improved(answers + made, 1.0 - _FEW_SHARE)]

    def found(self, known: list[_Answer], share: float) -> list[_Answer]:
        """Search for other answers in a share of a round; return none if the remaining time is not enough for its
        patterns."""
        asked, patterns = self.problem, []
        if self.is_met(known) or not (steps := self.budget.patterns(asked, share * _PATTERN_SHARE)):
            return []
        for _, rows in known:
            timing = time_rows(asked, rows)
            assert timing is not None
            patterns.append(pattern_of(asked, timing))
        samples = math.ceil(steps * _SAMPLES)
        climbed = hill_climb(asked, patterns, samples, steps - samples, self.budget.random, self.bound * _MET)
        found = [(candidate.cost, candidate.rows) for candidate in climbed]
        return [*found, self.improved(known + found, share * (1 - _PATTERN_SHARE))]

    def improved(self, answers: list[_Answer], share: float) -> _Answer:
        """Return the best that moves lead to: from different answers first, then from the best of what these became."""
        asked, budget = self.problem, self.budget
        best = min(answers, key=_objective)
        starts = sorted({cost: (cost, rows) for cost, rows in answers}.values(), key=_objective)[:_STARTS]
        for run, (heat, reach) in enumerate(_MOVES):
            if self.is_met([best]) or budget.is_over:
                break
            planned, most = budget.actions(share / len(_MOVES))
            _, rows = starts[run] if run < len(starts) else best
            reach = max(_LEAST_REACH, reach * asked.actions / asked.ranks)
            enough = self.bound * _MET
            best = min(best, improve(asked, rows, budget.random, planned, most, enough, heat, reach), key=_objective)
        return best


_objective: Callable[[_Answer], float] = itemgetter(0)
_seconds: Callable[[KnownSchedule], float] = attrgetter("seconds")

"""Patterns -> better patterns: a small population of different ones, each changed a little, the best kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from penstock.search.dispatch import Pattern, dispatch
from penstock.search.pattern import sample, vary
from penstock.search.problem import Problem, Rows
from penstock.search.timing import time_rows

_POPULATION = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """Rows, how good they are, and the pattern that led to them. (Score and cost: as of `Timing`.)"""

    score: float
    cost: float
    rows: Rows
    pattern: Pattern


def climb(
    problem: Problem,
    patterns: Iterable[Pattern],
    samples: int,
    steps: int,
    random: Random,
    done: Callable[[float], bool],
) -> list[Candidate]:
    """The best candidates, best first: of the patterns given, of `samples` random ones, and of changes to the best.

    Args:
        problem: what is asked.
        patterns: to begin with.
        samples: how many random patterns are tried besides.
        steps: how many changes are tried.
        random: decides which.
        done: asked after each; whether an objective is good enough, or the time is over.
    """
    population: list[Candidate] = []
    for pattern in patterns:
        _offer(population, _candidate(problem, pattern))
    for step in range(samples + steps):
        if population and done(min(candidate.cost for candidate in population)):
            break
        if step < samples or not population:
            pattern = sample(problem, random)
        else:
            # The better, the more often.
            pattern = vary(problem, population[int(len(population) * random.random() ** 2)].pattern, random)
        _offer(population, _candidate(problem, pattern))
    return population


def _candidate(problem: Problem, pattern: Pattern) -> Candidate | None:
    rows = dispatch(problem, pattern)
    timing = time_rows(problem, rows) if rows is not None else None
    return Candidate(timing.score, timing.cost, rows, pattern) if rows is not None and timing is not None else None


def _offer(population: list[Candidate], new: Candidate | None) -> None:
    """Takes a candidate into the population if it is better than one there, and not as good as any: then it is one."""
    if new is None or any(abs(new.score - other.score) <= 1e-9 * other.score for other in population):
        return
    population.append(new)
    population.sort(key=lambda candidate: candidate.score)
    del population[_POPULATION:]

"""Patterns -> better patterns: a small population of different ones, changed a little at a time; the best are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from penstock.simulate.search.dispatch import Pattern, dispatch
from penstock.simulate.search.pattern import sample, vary
from penstock.simulate.search.problem import Problem, Rows
from penstock.simulate.search.timing import time_rows

_POPULATION = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """Rows, how good they are, and the pattern that led to them. (Score and cost as in `Timing`.)"""

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
    enough: float,
) -> list[Candidate]:
    """The best candidates, best first, from the given patterns, `samples` random ones, and changes to the best.

    Args:
        problem: the question.
        patterns: to start from.
        samples: how many random patterns are tried as well.
        steps: how many changes are tried.
        random: decides which.
        enough: an objective with which it ends.
    """
    population: list[Candidate] = []
    for pattern in patterns:
        _offer(population, _candidate(problem, pattern))
    for step in range(samples + steps):
        if population and min(candidate.cost for candidate in population) <= enough:
            break
        if step < samples or not population:
            pattern = sample(problem, random)
        else:
            # Better ones are chosen more often.
            pattern = vary(problem, population[int(len(population) * random.random() ** 2)].pattern, random)
        _offer(population, _candidate(problem, pattern))
    return population


def _candidate(problem: Problem, pattern: Pattern) -> Candidate | None:
    rows = dispatch(problem, pattern)
    timing = time_rows(problem, rows) if rows is not None else None
    return Candidate(timing.score, timing.cost, rows, pattern) if rows is not None and timing is not None else None


def _offer(population: list[Candidate], new: Candidate | None) -> None:
    """Adds a candidate to the population if it beats one there and equals none: equals are taken to be the same."""
    if new is None or any(abs(new.score - other.score) <= 1e-9 * other.score for other in population):
        return
    population.append(new)
    population.sort(key=lambda candidate: candidate.score)
    del population[_POPULATION:]

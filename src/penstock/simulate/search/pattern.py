"""Patterns to start from, and changes to them, in a small population of which the best are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from penstock.simulate.search.dispatch import Pattern, dispatch
from penstock.simulate.search.problem import Problem, Rows
from penstock.simulate.search.timing import Timing, time_rows

_PATIENCE = (0.0, 0.25, 0.5, 1.0)

HEURISTIC = tuple(
    (math.inf, *numbers, 0.0) for numbers in ((1.0, 2.5, 3.0), (1.0, 1.5, 4.0), (0.25, 1.5, 2.0), (0.25, 1.0, 2.0))
)
"""Of regular patterns: how late a W is, the patience, how slow backwards and forwards are, and how late the turn. Two
for the memory of ZB-2p, two for that of ZB-1p. They are tried however short the time is."""


def period_seconds(problem: Problem) -> float:
    """Return the shortest period that any pattern can have: the work of one microbatch on the busiest rank."""
    return max(problem.work_seconds) / max(problem.count)


def regular(problem: Problem) -> Iterator[Pattern]:
    """Yield patterns whose forwards, and whose backwards, travel at one speed, those that are best most often first.

    Slow forwards fill the memory before the first backward, and a W waits for a gap: so they contain what the heuristic
    of Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, finds (in its tables 5 and 6, or better): `HEURISTIC`.
    """
    chunks, period = problem.chunks, period_seconds(problem)
    delays, speeds = (math.inf, 0.0, problem.ranks * period), ((2.5, 1.5, 1.0, 2.0), (4.0, 3.0, 2.0, 1.0))
    for parameters in dict.fromkeys([*HEURISTIC, *product(delays, (1.0, 0.25), *speeds, (1.0, 0.0))]):
        delay, patience, backward, forward, turn = parameters
        travel = _travel(problem, [forward] * chunks, [backward] * chunks, turn)
        yield Pattern(*travel, _weights(problem, delay), period, patience, 0.0, ((1.0, 1.0),) * chunks)


def sample(problem: Problem, random: Random) -> Pattern:
    """Draw a random pattern: each chunk's forwards and backwards travel at their own speed."""
    chunks, period = problem.chunks, period_seconds(problem)
    forward = [2 ** random.uniform(-0.3, 2.0) for _ in range(chunks)]
    backward = [2 ** random.uniform(-0.5, 2.5) for _ in range(chunks)]
    # On a V, the nearer a rank is to the turn, the more room it needs for the second chunk.
    caps = [
        random.choice(((room, room), (room, 0.5), (room, random.random()), (room, 1 / problem.ranks)))
        for room in (random.choice((1.0, 1.0 - random.random() * 0.3)) for _ in range(chunks - 1))
    ]
    caps.append(random.choice(((1.0, 1.0), (1.0, 1.0), (1.0, random.random()))))
    delay = _sample_delay(problem, random)
    return Pattern(
        *_travel(problem, forward, backward, random.choice((0.0, 1.0, 2.0))),
        weight=_weights(problem, delay),
        period=period,
        patience=random.choice(_PATIENCE),
        window=random.choice((0.0, 0.0, math.inf, math.inf, random.random() * period)),
        caps=tuple(caps),
    )


def vary(problem: Problem, pattern: Pattern, random: Random) -> Pattern:
    """Return the pattern with one or a few small changes."""
    period = period_seconds(problem)
    kind = random.random()
    if kind < 0.15:
        caps = list(pattern.caps)
        chunk = random.randrange(len(caps))
        first, last = (min(1.0, max(0.0, share + random.gauss(0, 0.1))) for share in caps[chunk])
        caps[chunk] = (first, last) if random.random() < 0.8 else (1.0, 1.0)
        pattern = replace(pattern, caps=tuple(caps))
    elif kind < 0.75:
        for _ in range(random.choice((1, 1, 2, 3))):  # faster or slower through some stages
            factor = 2 ** random.gauss(0, random.choice((0.05, 0.2, 0.6)))
            stages = _stages(problem, random)
            if random.random() < 0.5:
                pattern = replace(pattern, forward=_scaled(pattern.forward, stages, factor))
            else:
                pattern = replace(pattern, backward=_scaled(pattern.backward, stages, factor))
    elif kind < 0.83:
        pattern = _shift(problem, pattern, random, period)
    elif kind < 0.87:
        pattern = replace(pattern, period=period * 2 ** random.gauss(0, 0.1))
    else:
        weight = _weights(problem, _sample_delay(problem, random))  # right after I, only in gaps, or in between
        if random.random() >= 0.6:  # on some stages
            stages = _stages(problem, random)
            weight = tuple(weight[i] if i in stages else value for i, value in enumerate(pattern.weight))
        pattern = replace(pattern, weight=weight)
    if random.random() < 0.15:
        pattern = replace(pattern, patience=random.choice(_PATIENCE))
    if random.random() < 0.15:
        pattern = replace(pattern, window=random.choice((0.0, math.inf, random.random() * period)))
    return pattern


def pattern_from_timing(problem: Problem, timing: Timing) -> Pattern:
    """Return the pattern that rows repeat: when each lane starts on average, one period per microbatch."""
    period = period_seconds(problem)
    starts = []
    for lane, ends in enumerate(timing.ends):
        offsets = [end - k * period for k, end in enumerate(ends)]
        starts.append(sum(offsets) / max(1, len(offsets)) - problem.seconds[lane])
    forward, backward, weight = [], [], []
    for stage in range(problem.stages):
        lane = 3 * stage
        first, last = problem.placement.is_first(stage), problem.placement.is_last(stage)
        forward.append(starts[lane] - (0.0 if first else starts[lane - 3]))
        backward.append(starts[lane + 1] - starts[lane if last else lane + 4])
        weight.append(starts[lane + 2] - starts[lane + 1])
    caps = ((1.0, 1.0),) * problem.chunks
    return Pattern(tuple(forward), tuple(backward), tuple(weight), period, 0.0, 0.0, caps)


def _travel(
    problem: Problem, forward: list[float], backward: list[float], turn: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the increments from stage to stage: each stage's time, times its chunk's factor, plus the message's."""
    down, up = [], []
    for stage in range(problem.stages):
        lane, chunk = 3 * stage, _chunk(problem, stage)
        if problem.placement.is_first(stage):
            down.append(0.0)
        else:
            down.append(problem.seconds[lane - 3] * forward[_chunk(problem, stage - 1)] + problem.lag[lane])
        if problem.placement.is_last(stage):
            up.append(problem.seconds[lane] * (1.0 + turn))
        else:
            up.append(problem.seconds[lane + 4] * backward[chunk] + problem.lag[lane + 1])
    return tuple(down), tuple(up)


def _chunk(problem: Problem, stage: int) -> int:
    depth = problem.placement.depth
    return stage % depth * problem.chunks // depth


def _stages(problem: Problem, random: Random) -> range:
    """Draw stages to change together: a chunk, all, or any contiguous piece."""
    kind = random.random()
    if kind < 0.6:
        size = math.ceil(problem.stages / problem.chunks)
        first = random.randrange(problem.chunks) * size
        return range(first, min(problem.stages, first + size))
    if kind < 0.75:
        return range(problem.stages)
    first, last = sorted(random.randrange(problem.stages) for _ in range(2))
    return range(first, last + 1)


def _scaled(values: tuple[float, ...], stages: range, factor: float) -> tuple[float, ...]:
    return tuple(value * factor if i in stages else value for i, value in enumerate(values))


def _shift(problem: Problem, pattern: Pattern, random: Random, period: float) -> Pattern:
    """Move one stage's F or I earlier or later; the next stage makes up for it."""
    delta = random.gauss(0, period * random.choice((0.03, 0.1, 0.3)))
    stage = random.randrange(problem.stages)
    if random.random() < 0.5:
        values, neighbor = list(pattern.forward), stage + 1
    else:
        values, neighbor = list(pattern.backward), stage - 1
    values[stage] += delta
    if 0 <= neighbor < problem.stages:
        values[neighbor] -= delta
    if neighbor > stage:
        return replace(pattern, forward=tuple(values))
    return replace(pattern, backward=tuple(values))


def _sample_delay(problem: Problem, random: Random) -> float:
    """Draw how long a W may wait after its I: not at all, until a gap, or some periods."""
    periods = period_seconds(problem) * (2 ** random.uniform(-1.0, math.log2(2 * problem.ranks * problem.chunks)))
    return random.choice((0.0, math.inf, periods, periods))


def _weights(problem: Problem, delay: float) -> tuple[float, ...]:
    """Return the time from I's start to W's, for each stage: at most a time longer than any pattern, after which a W
    runs only in gaps, to free memory, and at the end."""
    delay = min(delay, sum(problem.work_seconds) + sum(problem.lag))
    return tuple(problem.seconds[3 * stage + 1] + delay for stage in range(problem.stages))


_POPULATION = 12


@dataclass(frozen=True, slots=True)
class Candidate:
    """Rows, how good they are, and the pattern that led to them. (Score and cost as in `Timing`.)"""

    score: float
    cost: float
    rows: Rows
    pattern: Pattern


def hill_climb(
    problem: Problem,
    patterns: Iterable[Pattern],
    samples: int,
    steps: int,
    random: Random,
    target: float,
) -> list[Candidate]:
    """Search around these patterns, `samples` random ones, and changes to the best; return the best candidates, best
    first.

    Args:
        problem: the question.
        patterns: to start from.
        samples: how many random patterns are tried as well.
        steps: how many changes are tried.
        random: decides which.
        target: the objective at which the search ends.
    """
    population: list[Candidate] = []
    for pattern in patterns:
        _add_candidate(population, _candidate(problem, pattern))
    for step in range(samples + steps):
        if population and min(candidate.cost for candidate in population) <= target:
            break
        if step < samples or not population:
            pattern = sample(problem, random)
        else:
            # Better ones are chosen more often.
            pattern = vary(problem, population[int(len(population) * random.random() ** 2)].pattern, random)
        _add_candidate(population, _candidate(problem, pattern))
    return population


def _candidate(problem: Problem, pattern: Pattern) -> Candidate | None:
    rows = dispatch(problem, pattern)
    timing = time_rows(problem, rows) if rows is not None else None
    return Candidate(timing.score, timing.cost, rows, pattern) if rows is not None and timing is not None else None


def _add_candidate(population: list[Candidate], new: Candidate | None) -> None:
    """Add a candidate to the population if it beats one there and equals none: equals are taken to be the same."""
    if new is None or any(abs(new.score - member.score) <= 1e-9 * member.score for member in population):
        return
    population.append(new)
    population.sort(key=lambda candidate: candidate.score)
    del population[_POPULATION:]

"""Rows -> better rows, by moving single actions on the critical path along their rank's row; and rows for more
microbatches, by repeating the middle: where a schedule wins or loses is its beginning and its end.

Simulated annealing (Kirkpatrick et al., Science 1983) over the moves of job-shop search: the objective can only fall if
an action on the critical path changes places with others (van Laarhoven et al., Operations Research 1992).
"""

from __future__ import annotations

import math
from random import Random

from penstock.simulate.search.problem import Problem, Rows
from penstock.simulate.search.timing import Effort, Timing, critical_path, fits, time_rows

_MOVE_ACTIONS = 100  # the overhead of a move, in actions timed; and a little for all
_FILLING = 0.25  # the share of moves that bring a W from anywhere
_TRIES = 30  # moves that are considered to find one that fits in memory
_CRITICAL = 0.9  # the share of moves on the critical path; the others make room for them


def improve(
    problem: Problem,
    rows: Rows,
    random: Random,
    actions: float,
    limit: float,
    target: float,
    heat: float,
    reach: float,
) -> tuple[float, Rows]:
    """Improve rows by moves; return the best objective, and its rows.

    Args:
        problem: the question.
        rows: to start from; they can be run, and fit in memory.
        random: decides which moves are tried.
        actions: how many are timed in total; the annealing cools down over them.
        limit: after how many of them it ends in any case.
        target: the objective at which the search ends.
        heat: how much worse a step may initially be on average, as a share of an action's time.
        reach: how many places along its row an action moves on average. Low values explore everything nearby; high ones
            find what is far away, such as a W that can fill a gap.
    """
    rows = rows[:]
    timing = time_rows(problem, rows)
    assert timing is not None
    best, best_rows = timing, rows[:]
    path = critical_path(problem, rows, timing)
    temperature = heat * sum(problem.seconds) / problem.lanes
    effort = Effort()
    while effort.actions < min(actions, limit) and best.cost > target:
        effort.actions += _MOVE_ACTIONS + problem.actions // 12
        move = _move(problem, rows, timing, path, reach, random)
        if move is None:
            continue
        rank, row, changed_at = move
        rows[rank], old_row = row, rows[rank]
        allowed = timing.score - temperature * max(0.0, 1 - effort.actions / actions) ** 2 * math.log(
            1 - random.random()
        )
        candidate = time_rows(problem, rows, allowed, timing, changed_at, effort)
        if candidate is None or candidate.score > allowed:
            rows[rank] = old_row
            continue
        timing = candidate
        path = critical_path(problem, rows, timing)
        if (timing.cost, timing.score) < (best.cost, best.score):
            best, best_rows = timing, rows[:]
    return best.cost, best_rows


def _move(
    problem: Problem, rows: Rows, timing: Timing, path: list[tuple[int, int]], reach: float, random: Random
) -> tuple[int, list[int], float] | None:
    """Move an action of one row; return the row, its rank, and when it started to differ. None if no move fits in
    memory."""
    for _ in range(_TRIES):
        if random.random() < _CRITICAL:
            rank, i = random.choice(path)
        else:
            rank = random.randrange(len(rows))
            i = random.randrange(len(rows[rank]))
        row = rows[rank]
        if random.random() < _FILLING:
            # The rank may have waited here: a W from elsewhere may fill the gap.
            to, i = i, random.randrange(len(row))
            if row[i] % 3 < 2:
                continue
        else:
            distance = 1 + int(random.expovariate(1 / reach))
            to = max(0, i - distance) if random.random() < 0.5 else min(len(row) - 1, i + distance)
        candidate = row[:]
        candidate.insert(to, candidate.pop(i))
        if candidate != row and fits(problem, rank, candidate):
            unchanged = min(i, to)
            lane = row[unchanged]
            return rank, candidate, timing.starts[lane][row[:unchanged].count(lane)]
    return None


_CUTS = 12  # moments to try


def extrapolate(small: Problem, rows: Rows, large: Problem) -> tuple[float, Rows] | None:
    """Extend `rows` to `large` by repeating their middle; return the best objective and the rows, or None if no such
    rows can run.

    Args:
        small: the problem that `rows` solve.
        rows: of `small`; they can be run.
        large: the same problem for more microbatches.
    """
    timing = time_rows(small, rows)
    assert timing is not None
    extra = [larger - smaller for larger, smaller in zip(large.count, small.count, strict=True)]
    best: tuple[float, Rows] | None = None
    end = max(ends[-1] for ends in timing.ends)
    for cut in range(1, _CUTS):
        moment = end * cut / _CUTS
        extended = [_repeat_lanes(small, row, timing, moment, extra) for row in rows]
        if not all(fits(large, rank, row) for rank, row in enumerate(extended)):
            continue
        extended_timing = time_rows(large, extended, best[0] if best else math.inf)
        if extended_timing is not None and (best is None or extended_timing.cost < best[0]):
            best = extended_timing.cost, extended
    return best


def _repeat_lanes(problem: Problem, row: list[int], timing: Timing, moment: float, extra: list[int]) -> list[int]:
    """Repeat each of the row's lanes `extra` times, in the order in which they come next at a moment."""
    counts = [0] * problem.lanes
    cut = len(row)
    for i, lane in enumerate(row):
        if timing.starts[lane][counts[lane]] >= moment:
            cut = i
            break
        counts[lane] += 1
    order = list(dict.fromkeys(row[cut:] + row))
    rounds = max((extra[lane] for lane in order), default=0)
    repeats = [lane for k in range(rounds) for lane in order if k < extra[lane]]
    return row[:cut] + repeats + row[cut:]

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
    enough: float,
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
        enough: an objective with which it ends.
        heat: how much worse a step may initially be on average, as a share of an action's time.
        reach: how many places along its row an action moves on average. Low values explore everything nearby; high ones
            find what is far away, such as a W that can fill a gap.
    """
    rows = rows[:]
    timing = time_rows(problem, rows)
    assert timing is not None
    best, kept = timing, rows[:]
    path = critical_path(problem, rows, timing)
    hot = heat * sum(problem.seconds) / problem.lanes
    effort = Effort()
    while effort.actions < min(actions, limit) and best.cost > enough:
        effort.actions += _MOVE_ACTIONS + problem.actions // 12
        moved = _move(problem, rows, timing, path, reach, random)
        if moved is None:
            continue
        rank, row, since = moved
        rows[rank], before = row, rows[rank]
        worst = timing.score - hot * max(0.0, 1 - effort.actions / actions) ** 2 * math.log(1 - random.random())
        tried = time_rows(problem, rows, worst, timing, since, effort)
        if tried is None or tried.score > worst:
            rows[rank] = before
            continue
        timing = tried
        path = critical_path(problem, rows, timing)
        if (timing.cost, timing.score) < (best.cost, best.score):
            best, kept = timing, rows[:]
    return best.cost, kept


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
            places = 1 + int(random.expovariate(1 / reach))
            to = max(0, i - places) if random.random() < 0.5 else min(len(row) - 1, i + places)
        made = row[:]
        made.insert(to, made.pop(i))
        if made != row and fits(problem, rank, made):
            same = min(i, to)
            lane = row[same]
            return rank, made, timing.starts[lane][row[:same].count(lane)]
    return None


_CUTS = 12  # moments to try


def extrapolate(few: Problem, rows: Rows, many: Problem) -> tuple[float, Rows] | None:
    """Extend `rows` to `many` by repeating their middle; return the best objective and the rows, or None if no such
    rows can run.

    Args:
        few: the question that `rows` answer.
        rows: of `few`; they can be run.
        many: the same question for more microbatches.
    """
    timing = time_rows(few, rows)
    assert timing is not None
    more = [larger - less for larger, less in zip(many.count, few.count, strict=True)]
    best: tuple[float, Rows] | None = None
    end = max(ends[-1] for ends in timing.ends)
    for cut in range(1, _CUTS):
        moment = end * cut / _CUTS
        made = [_repeated(few, row, timing, moment, more) for row in rows]
        if not all(fits(many, rank, row) for rank, row in enumerate(made)):
            continue
        found = time_rows(many, made, best[0] if best else math.inf)
        if found is not None and (best is None or found.cost < best[0]):
            best = found.cost, made
    return best


def _repeated(problem: Problem, row: list[int], timing: Timing, moment: float, more: list[int]) -> list[int]:
    """Repeat each of the row's lanes as often as `more` says, in the order in which they come next at a moment."""
    taken = [0] * problem.lanes
    at = len(row)
    for i, lane in enumerate(row):
        if timing.starts[lane][taken[lane]] >= moment:
            at = i
            break
        taken[lane] += 1
    order = list(dict.fromkeys(row[at:] + row))
    rounds = max((more[lane] for lane in order), default=0)
    between = [lane for k in range(rounds) for lane in order if k < more[lane]]
    return row[:at] + between + row[at:]

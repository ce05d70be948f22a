"""When given rows run, and how good that is. The search asks this thousands of times, so it uses plain lists.

The final answer is timed by `penstock.simulate`, which agrees with this.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from penstock.simulate.search.problem import Problem, Rows

_EVENNESS = 0.005  # the weight of the mean over ranks next to the largest: it tells two plateaus apart


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of rows that can be run.

    Attributes:
        starts, ends: for each lane, when each microbatch starts and ends.
        cost: the objective, in seconds.
        score: the objective, with a little of the mean over ranks: what a search climbs on.
        worst: the rank that the objective is about.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    cost: float
    score: float
    worst: int


@dataclass(slots=True)
class Effort:
    """How many actions were timed: a measure of search time that does not depend on the machine."""

    actions: int = 0


def time_rows(
    problem: Problem,
    rows: Rows,
    most: float = math.inf,
    before: Timing | None = None,
    since: float = 0.0,
    effort: Effort | None = None,
) -> Timing | None:
    """Time each action as if it started as soon as it can.

    None if ranks wait for each other in a circle, or an action waits for a later one of its own rank, or the objective
    exceeds `most`.

    Args:
        problem: the question.
        rows: the lanes of each rank.
        most: timing stops once it is certain that the objective exceeds this.
        before, since: the timing of rows that differ only in actions that started at `since` or later; everything
            earlier is taken from there.
        effort: counts the actions that were timed.
    """
    seconds, need, lag = problem.seconds, problem.need, problem.lag
    starts, ends, at, now, idle = _resumed(problem, before, since)
    first = [starts[row[0]][0] if i else 0.0 for row, i in zip(rows, at, strict=True)]
    spans = problem.objective == "span"
    slack = [most * (1 + 1e-12) - work for work in problem.work_seconds]
    idle = [used - (start if spans else 0.0) for used, start in zip(idle, first, strict=True)]
    effort = effort or Effort()
    effort.actions -= sum(at)
    sleeper = [-1] * len(seconds)
    turns = list(range(len(rows)))
    while turns:
        rank = turns.pop()
        row, i, time = rows[rank], at[rank], now[rank]
        last = len(row)
        while i < last:
            lane = row[i]
            done = ends[lane]
            if (source := need[lane]) >= 0:
                if len(ends[source]) <= len(done):
                    sleeper[source] = rank
                    break
                arrival = ends[source][len(done)] + lag[lane]
                if arrival > time:
                    if i or not spans:
                        idle[rank] += arrival - time
                        if idle[rank] > slack[rank]:
                            effort.actions += sum(at) + i - at[rank]
                            return None
                    time = arrival
            if not i:
                first[rank] = time
            starts[lane].append(time)
            time += seconds[lane]
            done.append(time)
            i += 1
            if sleeper[lane] >= 0:
                turns.append(sleeper[lane])
                sleeper[lane] = -1
        at[rank], now[rank] = i, time
    effort.actions += sum(at)
    if any(map(int.__lt__, at, map(len, rows))):
        return None
    if spans:
        now = [end - start for end, start in zip(now, first, strict=True)]
    cost = max(now)
    return Timing(starts, ends, cost, cost + _EVENNESS * sum(now) / len(now), now.index(cost))


def _resumed(
    problem: Problem, before: Timing | None, since: float
) -> tuple[list[list[float]], list[list[float]], list[int], list[float], list[float]]:
    """Return what had started before a moment: starts and ends by lane; by rank, how many, the last end, and the
    waits."""
    ranks = range(problem.ranks)
    if before is None:
        empty: list[list[float]] = [[] for _ in problem.seconds]
        return empty, [[] for _ in problem.seconds], [0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
    counts = [bisect_left(starts, since) for starts in before.starts]
    at, now, worked = [0] * problem.ranks, [0.0] * problem.ranks, [0.0] * problem.ranks
    for lane, count in enumerate(counts):
        if count:
            rank = problem.placement.rank_of[lane // 3]
            at[rank] += count
            now[rank] = max(now[rank], before.ends[lane][count - 1])
            worked[rank] += count * problem.seconds[lane]
    return (
        [starts[:count] for starts, count in zip(before.starts, counts, strict=True)],
        [ends[:count] for ends, count in zip(before.ends, counts, strict=True)],
        at,
        now,
        [end - work for end, work in zip(now, worked, strict=True)],
    )


def fits(problem: Problem, rank: int, row: list[int]) -> bool:
    """Whether a row stays within its rank's memory limit, and each stage's F comes before I and W."""
    held, kept, limit = problem.held, problem.kept, problem.limit[rank]
    taken = [0] * problem.lanes
    memory = 0.0
    for lane in row:
        stage, op = divmod(lane, 3)
        if op and taken[lane] >= taken[lane - 1]:
            return False
        taken[lane] += 1
        if op == 0:
            memory += held[stage]
            if memory > limit:
                return False
        elif op == 1:
            memory -= held[stage] - kept[stage]
        else:
            memory -= kept[stage]
    return True


def critical_path(problem: Problem, rows: Rows, timing: Timing) -> list[tuple[int, int]]:
    """Return the actions, as (rank, index in its row), that the objective's last end waited for, last first."""
    starts, ends, rank = timing.starts, timing.ends, timing.worst
    at, left = [len(row) for row in rows], [*problem.count]  # where each rank's walk back is, and what is before it
    path: list[tuple[int, int]] = []

    def back() -> int:
        at[rank] -= 1
        lane = rows[rank][at[rank]]
        left[lane] -= 1
        return lane

    lane = back()
    while True:
        path.append((rank, at[rank]))
        k = left[lane]
        if at[rank]:
            before = rows[rank][at[rank] - 1]
            if ends[before][left[before] - 1] >= starts[lane][k]:
                lane = back()
                continue
        source = problem.need[lane]
        if source < 0:
            return path
        rank, lane = problem.rank_of(source), -1
        while lane != source or left[lane] != k:
            lane = back()

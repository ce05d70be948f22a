"""The timing of rows, and their objective. The search computes it thousands of times, so it uses plain lists.

The final answer is timed by `penstock.simulate`, which agrees with this.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from penstock.simulate.search.problem import Problem, Rows

_EVENNESS = 0.005  # the weight of the mean over ranks next to the largest: it ranks rows of equal objective


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of rows that can be run.

    Attributes:
        starts, ends: for each lane, when each microbatch starts and ends.
        cost: the objective, in seconds.
        score: the objective, with a little of the mean over ranks: what a search climbs on.
        critical_rank: the rank that the objective is about.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    cost: float
    score: float
    critical_rank: int


@dataclass(slots=True)
class Effort:
    """How many actions were timed: a measure of search time that does not depend on the machine."""

    actions: int = 0


def time_rows(
    problem: Problem,
    rows: Rows,
    limit: float = math.inf,
    previous: Timing | None = None,
    changed_at: float = 0.0,
    effort: Effort | None = None,
) -> Timing | None:
    """Time each action as if it started as soon as it can.

    None if ranks wait for each other in a circle, or an action waits for a later one of its own rank, or the objective
    exceeds `limit`.

    Args:
        problem: the question.
        rows: the lanes of each rank.
        limit: timing stops once it is certain that the objective exceeds this.
        previous, changed_at: the timing of rows that differ only in actions that started at `changed_at` or later;
            everything earlier is taken from there.
        effort: counts the actions that were timed.
    """
    seconds, need, lag = problem.seconds, problem.need, problem.lag
    starts, ends, position, now, idle = _state_before(problem, previous, changed_at)
    first = [starts[row[0]][0] if i else 0.0 for row, i in zip(rows, position, strict=True)]
    is_span = problem.objective == "span"
    slack = [limit * (1 + 1e-12) - work for work in problem.work_seconds]
    idle = [used - (start if is_span else 0.0) for used, start in zip(idle, first, strict=True)]
    effort = effort or Effort()
    effort.actions -= sum(position)
    sleeper = [-1] * len(seconds)
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, i, time = rows[rank], position[rank], now[rank]
        last = len(row)
        while i < last:
            lane = row[i]
            lane_ends = ends[lane]
            if (source := need[lane]) >= 0:
                if len(ends[source]) <= len(lane_ends):
                    sleeper[source] = rank
                    break
                arrival = ends[source][len(lane_ends)] + lag[lane]
                if arrival > time:
                    if i or not is_span:
                        idle[rank] += arrival - time
                        if idle[rank] > slack[rank]:
                            effort.actions += sum(position) + i - position[rank]
                            return None
                    time = arrival
            if not i:
                first[rank] = time
            starts[lane].append(time)
            time += seconds[lane]
            lane_ends.append(time)
            i += 1
            if sleeper[lane] >= 0:
                runnable.append(sleeper[lane])
                sleeper[lane] = -1
        position[rank], now[rank] = i, time
    effort.actions += sum(position)
    if any(map(int.__lt__, position, map(len, rows))):
        return None
    if is_span:
        now = [end - start for end, start in zip(now, first, strict=True)]
    cost = max(now)
    return Timing(starts, ends, cost, cost + _EVENNESS * sum(now) / len(now), now.index(cost))


def _state_before(
    problem: Problem, previous: Timing | None, changed_at: float
) -> tuple[list[list[float]], list[list[float]], list[int], list[float], list[float]]:
    """Return what had started before a moment: starts and ends by lane; by rank, how many, the last end, and the
    waits."""
    ranks = range(problem.ranks)
    if previous is None:
        empty: list[list[float]] = [[] for _ in problem.seconds]
        return empty, [[] for _ in problem.seconds], [0 for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
    counts = [bisect_left(starts, changed_at) for starts in previous.starts]
    position, now, worked = [0] * problem.ranks, [0.0] * problem.ranks, [0.0] * problem.ranks
    for lane, count in enumerate(counts):
        if count:
            rank = problem.placement.rank_of[lane // 3]
            position[rank] += count
            now[rank] = max(now[rank], previous.ends[lane][count - 1])
            worked[rank] += count * problem.seconds[lane]
    return (
        [starts[:count] for starts, count in zip(previous.starts, counts, strict=True)],
        [ends[:count] for ends, count in zip(previous.ends, counts, strict=True)],
        position,
        now,
        [end - work for end, work in zip(now, worked, strict=True)],
    )


def fits(problem: Problem, rank: int, row: list[int]) -> bool:
    """Whether a row stays within its rank's memory limit, and each stage's F comes before I and W."""
    held, kept, limit = problem.held, problem.kept, problem.limit[rank]
    counts = [0] * problem.lanes
    memory = 0.0
    for lane in row:
        stage, op = divmod(lane, 3)
        if op and counts[lane] >= counts[lane - 1]:
            return False
        counts[lane] += 1
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
    starts, ends, rank = timing.starts, timing.ends, timing.critical_rank
    position, remaining = [len(row) for row in rows], [*problem.count]  # of the walk back, by rank and by lane
    path: list[tuple[int, int]] = []

    def step_back() -> int:
        position[rank] -= 1
        lane = rows[rank][position[rank]]
        remaining[lane] -= 1
        return lane

    lane = step_back()
    while True:
        path.append((rank, position[rank]))
        k = remaining[lane]
        if position[rank]:
            previous = rows[rank][position[rank] - 1]
            if ends[previous][remaining[previous] - 1] >= starts[lane][k]:
                lane = step_back()
                continue
        source = problem.need[lane]
        if source < 0:
            return path
        rank, lane = problem.rank_of(source), -1
        while lane != source or remaining[lane] != k:
            lane = step_back()

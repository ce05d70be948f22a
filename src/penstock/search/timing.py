"""When fixed rows run, and how good that is: what the search asks thousands of times, so on plain lists.

The final answer is timed by `penstock.simulate`; this agrees with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.search.problem import Problem, Rows

_EVENNESS = 0.02  # how much the mean over ranks counts beside the largest: it tells two plateaus apart


@dataclass(frozen=True, slots=True)
class Timing:
    """Of rows that run.

    Attributes:
        ends: for each lane, when each microbatch ends.
        cost: the objective, in seconds.
        score: the objective, with a little of the mean over ranks: what a search climbs on.
        worst: the rank that the objective is about.
    """

    ends: list[list[float]]
    cost: float
    score: float
    worst: int


def time_rows(problem: Problem, rows: Rows) -> Timing | None:
    """Each action as soon as it can. None if ranks wait for each other in a circle, or an action for a later one."""
    seconds, need, lag = problem.seconds, problem.need, problem.lag
    ends: list[list[float]] = [[] for _ in seconds]
    at, now, first = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
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
                    time = arrival
            if not i:
                first[rank] = time
            time += seconds[lane]
            done.append(time)
            i += 1
            if sleeper[lane] >= 0:
                turns.append(sleeper[lane])
                sleeper[lane] = -1
        at[rank], now[rank] = i, time
    if any(map(int.__lt__, at, map(len, rows))):
        return None
    return rated(problem, ends, first, now)


def rated(problem: Problem, ends: list[list[float]], first: list[float], last: list[float]) -> Timing:
    """How good it is to start at `first` and to end at `last` on each rank."""
    if problem.objective == "span":
        last = [end - start for end, start in zip(last, first, strict=True)]
    cost = max(last)
    return Timing(ends, cost, cost + _EVENNESS * sum(last) / len(last), last.index(cost))


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
    """The actions, as (rank, index in its row), that the objective's last end waited for, last first."""
    number, index = _numbers(problem, rows)
    ends, rank = timing.ends, timing.worst
    i, path = len(rows[rank]) - 1, []
    while True:
        path.append((rank, i))
        lane, k = rows[rank][i], number[rank][i]
        start = ends[lane][k] - problem.seconds[lane]
        close = start - 1e-9 * (1.0 + start)
        if i and ends[rows[rank][i - 1]][number[rank][i - 1]] >= close:
            i -= 1
            continue
        source = problem.need[lane]
        if source < 0 or ends[source][k] + problem.lag[lane] < close:
            return path
        rank = problem.rank_of(source)
        i = index[source][k]


def _numbers(problem: Problem, rows: Rows) -> tuple[list[list[int]], list[list[int]]]:
    """For each place in a row its microbatch; for each lane and microbatch the place."""
    number: list[list[int]] = []
    index: list[list[int]] = [[] for _ in problem.seconds]
    for row in rows:
        numbers = []
        for i, lane in enumerate(row):
            numbers.append(len(index[lane]))
            index[lane].append(i)
        number.append(numbers)
    return number, index

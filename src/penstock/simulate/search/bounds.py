"""Lower bounds on the objective, which no schedule can beat.

Each action has a head, the longest chain of actions that must come before it, and a tail, the longest that must come
after. A rank runs one action at a time, so for any set of its actions the shortest head, the work and the shortest tail
add up; the best of these bounds over all sets is the length of Jackson's preemptive schedule (Carlier, "The one-machine
sequencing problem", EJOR 1982). Memory adds to the chains: an F must wait for whatever makes room for it. And what is
held long enough fills the memory: the product of time and memory is a bound, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.simulate.search.problem import Problem

Floats = NDArray[np.float64]
Heads = list[Floats]
"""For each lane and microbatch, the earliest start (or, backwards, the least time after the end); -inf if unrelated."""

_ROUNDS = 12  # how often chains go round through memory, if there are many actions
_MAX_FULL_ACTIONS = 2000  # actions: up to this many, chains are followed to their ends
_BUSIEST_RANKS = 4  # ranks that are considered as the bottleneck of another rank's span


def lower_bound(problem: Problem) -> float:
    """Return a time in seconds that no schedule can beat if its microbatches ascend and it stays within the memory
    limit."""
    chains = _Chains(problem)
    work = problem.work_seconds
    if problem.objective == "makespan":
        zeros = [0.0] * problem.lanes
        heads, tails = chains.heads(zeros), chains.tails(zeros)
        bounds = [_one_machine(problem, rank, heads, tails) for rank in range(problem.ranks)]
        return max(*bounds, *_areas(problem, chains), *work)
    span_bounds = [*work, *_areas(problem, chains)]
    busiest = sorted(range(problem.ranks), key=lambda rank: -work[rank])[:_BUSIEST_RANKS]
    for rank, stages in enumerate(problem.placement.by_rank):
        # Relative to the rank's first F, which comes before everything else on it.
        start = [0.0 if lane // 3 in stages else -math.inf for lane in range(problem.lanes)]
        heads, tails = chains.heads(start), chains.tails(start)
        span_bounds += [_one_machine(problem, other, heads, tails) for other in {rank, 0, problem.ranks - 1, *busiest}]
    return max(span_bounds)


class _Chains:
    """What must come before what: in a lane, on a stage, between stages, and for lack of memory."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        stages = range(problem.stages)
        self.order = [3 * s for s in stages] + [3 * s + 1 for s in reversed(stages)] + [3 * s + 2 for s in stages]
        self.waits: list[list[_Wait]] = [[(lane - 1, 0, 0.0)] if lane % 3 else [] for lane in range(problem.lanes)]
        for lane, source, lead in memory_waits(problem):
            if 0 <= lead < problem.count[lane]:
                self.waits[lane].append((source, lead, 0.0))
        for lane, source in enumerate(problem.need):
            if source >= 0:
                self.waits[lane].append((source, 0, problem.lag[lane]))
        self.dependents: list[list[_Wait]] = [[] for _ in self.waits]
        for lane, waits in enumerate(self.waits):
            for source, lead, lag in waits:
                self.dependents[source].append((lane, lead, lag))
        self.rounds = max(problem.count) + 1 if problem.actions <= _MAX_FULL_ACTIONS else _ROUNDS

    def heads(self, start: Sequence[float]) -> Heads:
        """Return the earliest start of each action, where lanes start at `start` (-inf: only after others)."""
        return self._longest(self.order, self.waits, start)

    def tails(self, end: Sequence[float]) -> Heads:
        """Return the least time from each action's end to the end of the lanes that have an `end` of 0."""
        return [lane[::-1] for lane in self._longest(self.order[::-1], self.dependents, end)]  # the same, backwards

    def _longest(self, order: Sequence[int], waits: Sequence[Sequence[_Wait]], initial: Sequence[float]) -> Heads:
        seconds = self.problem.seconds
        heads = [np.full(count, value) for count, value in zip(self.problem.count, initial, strict=True)]
        for _ in range(self.rounds):
            previous = [lane.copy() for lane in heads]
            for lane in order:
                head = heads[lane]
                for source, lead, lag in waits[lane]:
                    arrived = heads[source][: len(head) - lead] + seconds[source] + lag
                    np.maximum(head[lead:], arrived, out=head[lead:])
                heads[lane] = _run(head, seconds[lane])
            if all(map(np.array_equal, previous, heads)):
                break
        return heads


_Wait = tuple[int, int, float]
"""A lane that another waits for, by how many microbatches it may lag, and the seconds from its end on."""


def _run(head: Floats, seconds: float) -> Floats:
    """Run a lane's actions one after another: none starts before the previous one has ended."""
    steps = np.arange(len(head)) * seconds
    return np.asarray(np.maximum.accumulate(head - steps) + steps)


def memory_waits(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Yield the waits for memory as (lane, other, lead): the lane's microbatch lead + i waits for the other's
    microbatch i.

    When F of microbatch k starts on a stage, the k before it have had theirs there, and on the rank's stages below. The
    waits assume that as much as possible has been freed by then.
    """
    for rank, stages in enumerate(problem.placement.by_rank):
        limit = problem.limit[rank]
        if limit == math.inf:
            continue
        for pipeline in range(problem.placement.pipelines):
            local = [s for s in stages if problem.placement.pipeline_of(s) == pipeline and problem.held[s] > 0]
            for index, stage in enumerate(local):
                yield from _waits(problem, local, index, limit)
                below, above = (sum(problem.held[s] for s in part) for part in (local[: index + 1], local[index + 1 :]))
                if above:
                    # The oldest microbatch that has not been through all the rank's stages must find room on the
                    # others.
                    yield 3 * stage, 3 * local[-1], math.floor((limit - above) / below)


def _waits(problem: Problem, stages: Sequence[int], index: int, limit: float) -> Iterator[tuple[int, int, int]]:
    """Yield the waits of one stage's F: for the I and the W of its own stage and of those below it on the rank."""
    stage, held, kept = stages[index], problem.held, problem.kept
    total = sum(held[s] for s in stages[: index + 1])
    for i, lower in enumerate(stages[: index + 1]):
        # I goes down the stages, so at least as many are missing on those below; on those above, none.
        missing = sum(held[s] for s in stages[: i + 1])
        yield 3 * stage, 3 * lower + 1, math.floor((limit - total + missing) / missing)
        if kept[lower] > 0:  # all Is have ended, and all Ws on the other stages
            yield 3 * stage, 3 * lower + 2, math.floor((limit - total) / kept[lower]) + 1


def _one_machine(problem: Problem, rank: int, heads: Heads, tails: Heads) -> float:
    """Return the length of Jackson's preemptive schedule of a rank's actions: the most urgent first, with
    interruptions."""
    jobs = [
        (head, tail, problem.seconds[3 * stage + op])
        for stage in problem.placement.by_rank[rank]
        for op in range(3)
        for head, tail in zip(heads[3 * stage + op].tolist(), tails[3 * stage + op].tolist(), strict=True)
        if head > -math.inf and tail > -math.inf
    ]
    jobs.sort()
    waiting: list[tuple[float, float]] = []  # (-tail, what is left)
    now, longest, i = 0.0, 0.0, 0
    while i < len(jobs) or waiting:
        if not waiting and now < jobs[i][0]:
            now = jobs[i][0]
        while i < len(jobs) and jobs[i][0] <= now:
            heapq.heappush(waiting, (-jobs[i][1], jobs[i][2]))
            i += 1
        tail, remaining = heapq.heappop(waiting)
        if i < len(jobs) and now + remaining > jobs[i][0]:
            heapq.heappush(waiting, (tail, remaining - (jobs[i][0] - now)))
            now = jobs[i][0]
        else:
            now += remaining
            longest = max(longest, now - tail)
    return longest


def _areas(problem: Problem, chains: _Chains) -> list[float]:
    """Return, for each rank, the time in which its memory could hold everything that it must, for as long as it must.

    For the makespan, plus what comes before its first F.
    """
    area = [0.0] * problem.ranks
    for stage, rank in enumerate(problem.placement.rank_of):
        trip = _trip_seconds(problem, stage)
        weight_area = problem.kept[stage] * (trip + problem.seconds[3 * stage + 2])
        area[rank] += problem.count[3 * stage] * (weight_area + (problem.held[stage] - problem.kept[stage]) * trip)
    bounds = [a / limit if a and limit < math.inf else 0.0 for a, limit in zip(area, problem.limit, strict=True)]
    if problem.objective == "makespan":
        first = chains.heads([0.0] * problem.lanes)
        for rank, stages in enumerate(problem.placement.by_rank):
            bounds[rank] += min((float(first[3 * s][0]) for s in stages if len(first[3 * s])), default=0.0)
    return bounds


def _trip_seconds(problem: Problem, stage: int) -> float:
    """Return the least time from the start of a microbatch's F on a stage to the end of its I there."""
    lane, spent = 3 * stage, 0.0
    while lane % 3 == 0:
        spent += problem.seconds[lane]
        lane = problem.feeds[lane] if problem.feeds[lane] >= 0 else lane + 1
        spent += problem.lag[lane] if lane % 3 == 0 else 0.0
    while lane != 3 * stage + 1:
        spent += problem.seconds[lane]
        lane = problem.feeds[lane]
        spent += problem.lag[lane]
    return spent + problem.seconds[lane]

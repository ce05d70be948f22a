"""A pattern -> rows: whenever a rank is free, it starts the action that the pattern would have started first.

A pattern says when each stage's F, I and W of microbatch 0 would start in a steady state, and how long until the same
happens for the next microbatch: the repeated "building block" of Qi et al., "Pipeline Parallelism with Controllable
Memory", NeurIPS 2024, with one number per stage and pass. Dispatching squeezes the repetition into a schedule: what is
ready runs, within the memory limit, without deadlock, in the order of the pattern.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.simulate.search.problem import Problem, Rows


class Admission:
    """What each rank holds, and what it may still take, such that everything in flight can still finish.

    On a rank with several chunks, a microbatch holds the activations of all of them before it frees any. So the oldest
    one with chunks to go must always find room for them; then it finishes, and after it the next one.

    Args:
        problem: gives the memory limit.
        caps: for each chunk, the share of the limit that its F, and those of the chunks below it, may take until
            their I, on the first rank and on the last.
    """

    __slots__ = ("_caps", "_deeper_levels", "_forwards", "_held", "_in_flight", "_kept", "_limit", "_memory", "_stages")

    def __init__(self, problem: Problem, caps: Sequence[tuple[float, float]]) -> None:
        self._held, self._kept, self._limit = problem.held, problem.kept, problem.limit
        self._stages = problem.placement.by_rank
        self._memory = [0.0] * problem.ranks
        self._forwards = [0] * problem.stages
        self._in_flight = [0.0] * problem.stages
        self._caps = _caps(problem, caps)
        self._deeper_levels = _deeper_levels(problem) if problem.placement.pipelines > 1 else None

    def record(self, lane: int, rank: int) -> None:
        """Record that an action has started, which as far as memory goes also means ended."""
        stage, op = divmod(lane, 3)
        if op == 0:
            self._memory[rank] += self._held[stage]
            self._in_flight[stage] += self._held[stage]
            self._forwards[stage] += 1
        elif op == 1:
            self._memory[rank] -= self._held[stage] - self._kept[stage]
            self._in_flight[stage] -= self._held[stage]
        else:
            self._memory[rank] -= self._kept[stage]

    def admits(self, stage: int, rank: int) -> bool:
        """Whether the next F of a stage may start."""
        held = self._held[stage]
        if self._memory[rank] + held > self._limit[rank]:
            return False
        used = self._in_flight[stage] + held
        stages = self._stages[rank]
        if len(stages) == 1:
            return used <= self._caps[stage]
        if self._deeper_levels is not None:
            below = [(sum(self._in_flight[u] for u in lower), room) for lower, room in self._deeper_levels[stage]]
            return all(used + held <= room for used, room in below)
        for other in stages:
            if other == stage:
                break
            used += self._in_flight[other]
        return used <= self._caps[stage] and (stage == stages[-1] or self._oldest_fits(stage, rank))

    def _oldest_fits(self, stage: int, rank: int) -> bool:
        """Whether the oldest microbatch with chunks to go still finds room for them after an F of `stage`."""
        stages, forwards = self._stages[rank], self._forwards
        finished = forwards[stages[-1]]
        used = 0.0
        for lower in stages:
            ahead = forwards[lower] + (lower == stage) - finished
            used += self._held[lower] * ahead if ahead > 0 else self._held[lower]
        return used <= self._limit[rank]


def _caps(problem: Problem, shares: Sequence[tuple[float, float]]) -> list[float]:
    """Return, for each stage, what it and the lower ones on its rank may hold until their I: at least one microbatch
    each."""
    caps = [0.0] * problem.stages
    for rank, stages in enumerate(problem.placement.by_rank):
        fraction = rank / max(1, problem.ranks - 1)
        room = min(problem.limit[rank], sum(problem.held[s] * problem.count[3 * s] for s in stages))
        below = 0.0
        for stage, (first, last) in zip(stages, shares, strict=False):
            below = max(below + problem.held[stage], (first + (last - first) * fraction) * room)
            caps[stage] = below * (1 + 1e-9)
    return caps


def _deeper_levels(problem: Problem) -> list[list[tuple[list[int], float]]]:
    """Return, for each stage and each deeper level of its rank, the stages above that level and the room that they
    share.

    With several pipelines, waiting microbatches of one are in the other's way. The deepest one in flight can continue
    if there is room for its level, and then for those below, each of which holds nothing.
    """
    depth = problem.placement.depth
    result: list[list[tuple[list[int], float]]] = [[] for _ in range(problem.stages)]
    for rank, stages in enumerate(problem.placement.by_rank):
        for stage in stages:
            for level in sorted({s % depth for s in stages if s % depth > stage % depth}):
                lower = [s for s in stages if s % depth < level]
                room = problem.limit[rank] - sum(problem.held[s] for s in stages if s % depth >= level)
                result[stage].append((lower, room))
    return result


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which action goes first. In seconds, except for the shares.

    Attributes:
        forward: for each stage, how much later its F starts than that of the stage below.
        backward: for each stage, how much later its I starts than that of the stage above; for the last, than its own
            F.
        weight: for each stage, how much later its W starts than its I.
        period: from one microbatch to the next.
        patience: by how large a share of its own time an action may delay one that goes first but has yet to arrive.
            With 0 the rank waits for that one instead.
        window: how far, in the pattern, an F may overtake what its rank has yet to do.
        caps: for each chunk, the share of the memory limit that its F, and those of the chunks below it, may take until
            their I: on the first rank and on the last, interpolated linearly in between.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    period: float
    patience: float
    window: float
    caps: tuple[tuple[float, float], ...]

    def starts(self, problem: Problem) -> list[float]:
        """Return, for each lane, when its microbatch 0 starts."""
        placement, starts, now = problem.placement, [0.0] * problem.lanes, 0.0
        for stage in range(problem.stages):
            now = self.forward[stage] + (0.0 if placement.is_first(stage) else now)
            starts[3 * stage] = now
        for stage in reversed(range(problem.stages)):
            now = self.backward[stage] + (starts[3 * stage] if placement.is_last(stage) else now)
            starts[3 * stage + 1] = now
            starts[3 * stage + 2] = now + self.weight[stage]
        return starts


def dispatch(problem: Problem, pattern: Pattern) -> Rows | None:
    """Return the rows that the pattern leads to, within the memory limit and without deadlock.

    None if it gets stuck, which only happens with several pipelines in little memory.
    """
    return _Dispatch(problem, pattern).run()


class _Dispatch:
    """What has run and what is held, as time goes on.

    For each lane: `number`, the next microbatch; `key`, when the pattern would start it; `arrival`, when what it waits
    for is there (infinite until that is known); and `ends`, of the microbatches before it.
    """

    __slots__ = (
        "admission", "arrival", "due", "ends", "key", "lanes_on", "number", "patience", "period", "problem", "rows",
        "stalled", "window",
    )  # fmt: skip

    def __init__(self, problem: Problem, pattern: Pattern) -> None:
        self.problem = problem
        self.key, self.period = pattern.starts(problem), pattern.period
        self.patience, self.window = 1.0 - pattern.patience, pattern.window
        self.admission = Admission(problem, pattern.caps)
        self.ends: list[list[float]] = [[] for _ in problem.seconds]
        self.number = [0] * problem.lanes
        self.arrival = [math.inf] * problem.lanes
        self.rows: Rows = [[] for _ in range(problem.ranks)]
        self.lanes_on = [
            [(3 * s + op, s, op) for s in stages for op in range(3)] for stages in problem.placement.by_rank
        ]
        self.due = [0.0] * problem.ranks
        self.stalled = False
        for lane in range(0, problem.lanes, 3):
            self._update_arrival(lane)

    def run(self) -> Rows | None:
        """Handle events in order of time: a rank is free, or what it waits for has arrived."""
        due, remaining = self.due, self.problem.actions
        events = [(0.0, rank) for rank in range(self.problem.ranks)]
        now = 0.0
        while remaining:
            if not events:
                if self.stalled:
                    return None
                self.stalled = True  # every rank waits for its turn in the pattern: let one run out of turn
                events = [(now, rank) for rank in range(self.problem.ranks)]
                due[:] = [now] * len(events)
            now, rank = heapq.heappop(events)
            if now != due[rank]:
                continue
            lane, soonest = self._choose(rank, now)
            if lane >= 0:
                remaining -= 1
                self._start(lane, rank, now, events)
            else:
                due[rank] = soonest
                if soonest < math.inf:
                    heapq.heappush(events, (soonest, rank))
        return self.rows

    def _choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the lane to start now; or -1, and when to look again."""
        arrivals, keys = self.arrival, self.key
        cutoff = self._cutoff(rank) if self.window < math.inf and not self.stalled else math.inf
        next_key, next_arrival, soonest, blocked = math.inf, math.inf, math.inf, math.inf
        ready = []
        for lane, stage, op in self.lanes_on[rank]:
            arrival = arrivals[lane]
            if arrival == math.inf:
                continue
            key = keys[lane]
            if not op:
                if key > cutoff:
                    continue
                if not self.admission.admits(stage, rank):
                    if arrival <= now and key < blocked:
                        blocked = key
                    continue
            if arrival <= now:
                ready.append((key, lane))
            else:
                if arrival < soonest:
                    soonest = arrival
                if key < next_key:
                    next_key, next_arrival = key, arrival
        if blocked < math.inf:  # a W makes room for the waiting F, so it takes that one's turn
            ready = [(min(key, blocked) if lane % 3 == 2 else key, lane) for key, lane in ready]
        ready.sort()
        for key, lane in ready:
            if key <= next_key or now + self.problem.seconds[lane] * self.patience <= next_arrival:
                return lane, now
        return -1, soonest

    def _cutoff(self, rank: int) -> float:
        """Return how late in the pattern an F may be and still start now."""
        numbers, keys, earliest = self.number, self.key, math.inf
        for lane, _, op in self.lanes_on[rank]:
            if op < 2 and keys[lane] < earliest:
                end = numbers[lane - 1] if op else self.problem.count[lane]
                if numbers[lane] < end:
                    earliest = keys[lane]
        return earliest + self.window

    def _start(self, lane: int, rank: int, now: float, events: list[tuple[float, int]]) -> None:
        due, numbers = self.due, self.number
        end = now + self.problem.seconds[lane]
        self.stalled = False
        self.ends[lane].append(end)
        self.rows[rank].append(lane)
        self.admission.record(lane, rank)
        k = numbers[lane]
        numbers[lane] = k + 1
        self.key[lane] += self.period
        self._update_arrival(lane)
        if lane % 3 < 2 and numbers[lane + 1] == k:
            self._update_arrival(lane + 1)
        due[rank] = end
        heapq.heappush(events, (end, rank))
        dependent = self.problem.feeds[lane]
        if dependent >= 0 and numbers[dependent] == k:
            self._update_arrival(dependent)
            dependent_rank, arrival = self.problem.placement.rank_of[dependent // 3], self.arrival[dependent]
            row = self.rows[dependent_rank]
            is_idle = not row or self.ends[row[-1]][-1] <= now  # a busy rank will notice it later
            if arrival < due[dependent_rank] and now < due[dependent_rank] and is_idle:
                due[dependent_rank] = arrival
                heapq.heappush(events, (arrival, dependent_rank))

    def _update_arrival(self, lane: int) -> None:
        """Note when the lane's next microbatch can start, as far as that is known."""
        problem, k = self.problem, self.number[lane]
        if k == problem.count[lane] or (lane % 3 and self.number[lane - 1] <= k):
            self.arrival[lane] = math.inf
        elif (source := problem.need[lane]) < 0:
            self.arrival[lane] = 0.0
        elif self.number[source] > k:
            self.arrival[lane] = self.ends[source][k] + problem.lag[lane]
        else:
            self.arrival[lane] = math.inf

"""Which forwards fit in memory now, such that everything in flight can still finish.

On a rank with several chunks, a microbatch holds the activations of all of them before it frees any. So the oldest one
with chunks to go must always find room for them; then it finishes, and after it the next one. This is needed with one
pipeline too: microbatches keep their order, so no younger one can make room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.simulate.search.problem import Problem


class Admission:
    """What each rank holds, and what it may still take.

    Args:
        problem: gives the memory limit.
        caps: for each chunk, the share of the limit that its F, and those of the chunks below it, may take until
            their I, on the first rank and on the last.
    """

    __slots__ = ("_caps", "_deeper", "_forwards", "_held", "_kept", "_limit", "_memory", "_open", "_stages")

    def __init__(self, problem: Problem, caps: Sequence[tuple[float, float]]) -> None:
        self._held, self._kept, self._limit = problem.held, problem.kept, problem.limit
        self._stages = problem.placement.by_rank
        self._memory = [0.0] * problem.ranks
        self._forwards = [0] * problem.stages
        self._open = [0.0] * problem.stages
        self._caps = _caps(problem, caps)
        self._deeper = _deeper(problem) if problem.placement.pipelines > 1 else None

    def note(self, lane: int, rank: int) -> None:
        """Records that an action has started, which as far as memory goes also means ended."""
        stage, op = divmod(lane, 3)
        if op == 0:
            self._memory[rank] += self._held[stage]
            self._open[stage] += self._held[stage]
            self._forwards[stage] += 1
        elif op == 1:
            self._memory[rank] -= self._held[stage] - self._kept[stage]
            self._open[stage] -= self._held[stage]
        else:
            self._memory[rank] -= self._kept[stage]

    def admits(self, stage: int, rank: int) -> bool:
        """Whether the next F of a stage may start."""
        held = self._held[stage]
        if self._memory[rank] + held > self._limit[rank]:
            return False
        taken = self._open[stage] + held
        stages = self._stages[rank]
        if len(stages) == 1:
            return taken <= self._caps[stage]
        if self._deeper is not None:
            below = [(sum(self._open[u] for u in lower), room) for lower, room in self._deeper[stage]]
            return all(taken + held <= room for taken, room in below)
        for other in stages:
            if other == stage:
                break
            taken += self._open[other]
        return taken <= self._caps[stage] and (stage == stages[-1] or self._safe(stage, rank))

    def _safe(self, stage: int, rank: int) -> bool:
        """Whether the oldest microbatch with chunks to go still finds room for them after an F of `stage`."""
        stages, forwards = self._stages[rank], self._forwards
        through = forwards[stages[-1]]
        taken = 0.0
        for other in stages:
            ahead = forwards[other] + (other == stage) - through
            taken += self._held[other] * ahead if ahead > 0 else self._held[other]
        return taken <= self._limit[rank]


def _caps(problem: Problem, shares: Sequence[tuple[float, float]]) -> list[float]:
    """For each stage, what it and the lower ones on its rank may hold until their I: at least one microbatch each."""
    caps = [0.0] * problem.stages
    for rank, stages in enumerate(problem.placement.by_rank):
        place = rank / max(1, problem.ranks - 1)
        room = min(problem.limit[rank], sum(problem.held[s] * problem.count[3 * s] for s in stages))
        below = 0.0
        for stage, (first, last) in zip(stages, shares, strict=False):
            below = max(below + problem.held[stage], (first + (last - first) * place) * room)
            caps[stage] = below * (1 + 1e-9)
    return caps


def _deeper(problem: Problem) -> list[list[tuple[list[int], float]]]:
    """For each stage and each deeper level of its rank: the stages above that level, and the room that they share.

    With several pipelines, waiting microbatches of one are in the other's way. The deepest one in flight can continue
    if there is room for its level, and then for those below, each of which holds nothing.
    """
    depth = problem.placement.depth
    found: list[list[tuple[list[int], float]]] = [[] for _ in range(problem.stages)]
    for rank, stages in enumerate(problem.placement.by_rank):
        for stage in stages:
            for level in sorted({s % depth for s in stages if s % depth > stage % depth}):
                lower = [s for s in stages if s % depth < level]
                room = problem.limit[rank] - sum(problem.held[s] for s in stages if s % depth >= level)
                found[stage].append((lower, room))
    return found

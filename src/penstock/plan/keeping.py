"""What each stage does with its activations between forward and backward: keeps them, makes them again, or sends them
to the host; and how much memory each rank then needs.

That depends on the order of a rank's actions, not on their times, and on no other rank's choice, unless the two hold
copies of one stage. So each rank's choice is the one that fits with the least extra work, found by trying all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from penstock.plan.besides import Besides, running
from penstock.schedule import Action, Schedule
from penstock.schedule.kept import run_again, trips
from penstock.simulate import StageCost
from penstock.simulate.costs import LinkCost, OfStage

MAX_WAYS = 4096
"""Of a rank's stages; with more, all of them do the same."""

Floats = NDArray[np.float64]


class Way(Enum):
    """What a stage does with activations."""

    KEEPS = "keeps"
    RECOMPUTES = "recomputes"
    OFFLOADS = "offloads"


@dataclass(frozen=True, slots=True)
class Demand:
    """What stages need, if every one keeps its activations.

    Attributes:
        costs: of each stage of one copy.
        input_bytes: what each receives for a microbatch: all that a recomputed one keeps.
        host: to the host's memory and back; None: nothing is offloaded.
        limits: what each rank has.
        again_seconds: what each takes to run its forward again, if it is recomputed; empty: as long as the first time.
        besides: what each takes while it runs; empty: nothing.
    """

    costs: Sequence[StageCost]
    input_bytes: Sequence[float]
    host: LinkCost | None
    limits: Sequence[float]
    again_seconds: Sequence[float] = ()
    besides: Sequence[Besides] = ()


@dataclass(frozen=True)
class OfRank:
    """A stage's microbatches in its rank's row: the place of each one's forward, backward (B or I) and end (B or W)."""

    stage: int
    work: tuple[Action, ...]

    @cached_property
    def places(self) -> Mapping[int, tuple[int, int, int]]:
        """By number of the microbatch; without a backward, the forward ends it."""
        found: dict[int, list[int]] = {}
        for place, action in enumerate(self.work):
            if action.stage == self.stage and action.microbatch is not None:
                found.setdefault(action.microbatch, []).append(place)
        return {number: (places[0], places[min(1, len(places) - 1)], places[-1]) for number, places in found.items()}

    @cached_property
    def again(self) -> frozenset[int]:
        """The microbatches that run again if the stage is recomputed."""
        return run_again(lambda _: (), self.work, self.stage)

    @cached_property
    def away(self) -> frozenset[int]:
        """The microbatches that are away for long enough if it is offloaded."""
        return trips(self.work, self.stage).for_backward

    def held(self, way: Way, cost: StageCost, input_bytes: float) -> Floats:
        """The bytes that are there during each of the rank's actions."""
        size, late = cost.activation_bytes, cost.weight_gradient_bytes
        change = np.zeros(len(self.work) + 2)

        def hold(first: int, last: int, amount: float) -> None:
            change[first] += amount
            change[last + 1] -= amount

        for number, (forward, backward, end) in self.places.items():
            if way is Way.RECOMPUTES and number in self.again:
                hold(forward, end, input_bytes)
                hold(forward, forward, size)
                hold(backward, backward, size)
                if end > backward:
                    hold(backward + 1, end, late)
            elif way is Way.OFFLOADS and number in self.away:
                hold(forward, forward + 1, size)
                hold(backward - 1, backward, size)
                if end > backward:
                    hold(backward + 1, end, late)
            else:
                hold(forward, backward, size)
                if end > backward:
                    hold(backward + 1, end, late)
        return np.cumsum(change)[: len(self.work)]

    def cost(self, way: Way, cost: StageCost, again: float, seconds: Floats, host: LinkCost | None) -> OfStage:
        """The stage's cost; one for each microbatch (copies count on) if they differ.

        Args:
            again: the seconds that its forward takes when it runs again.
            seconds: of each of the rank's actions, if nothing is recomputed or offloaded.
        """
        if way is Way.RECOMPUTES:
            once_more = replace(cost, backward_input_seconds=cost.backward_input_seconds + again)
            return [once_more if number in self.again else cost for number in self._numbers()]
        if way is Way.OFFLOADS and host is not None:
            trip = host.seconds(cost.activation_bytes)
            return [self._stalled(cost, number, trip, seconds) for number in self._numbers()]
        return cost

    def _numbers(self) -> range:
        return range(max(self.places, default=-1) + 1)

    def _stalled(self, cost: StageCost, number: int, trip: float, seconds: Floats) -> StageCost:
        """With the time that a copy takes longer than the computation beside which it travels."""
        if number not in self.away:
            return cost
        forward, backward, _ = self.places[number]
        out, back = (max(0.0, trip - float(seconds[beside])) for beside in (forward + 1, backward - 1))
        return replace(
            cost,
            forward_seconds=cost.forward_seconds + out,
            backward_input_seconds=cost.backward_input_seconds + back,
        )


@dataclass(frozen=True)
class Keeping:
    """The ways of a schedule's stages.

    Attributes:
        ways: of each stage of one copy.
        peak_bytes: what each rank needs at most, all told.
        costs: of each stage, copies included.
    """

    ways: tuple[Way, ...]
    peak_bytes: tuple[float, ...]
    costs: tuple[OfStage, ...]


def best_keeping(schedule: Schedule, demand: Demand, kept_bytes: Sequence[float]) -> Keeping:
    """Each rank's way that fits with the least extra work; if none fits, the one that lacks least.

    Args:
        kept_bytes: what each rank needs if every stage keeps its activations.
    """
    place = schedule.placement
    ways, peaks = [Way.KEEPS] * place.depth, [*kept_bytes]
    costs: list[OfStage] = [*demand.costs] * place.pipelines
    for ranks in _together(schedule):
        if all(kept_bytes[rank] <= demand.limits[rank] for rank in ranks):
            continue
        group = _Group.of(schedule, demand, ranks)
        by_stage, needed = group.best()
        for stage, way in by_stage.items():
            ways[stage] = way
        for rank, peak in needed.items():
            peaks[rank] = peak
        for stage, part in group.parts.items():
            costs[stage] = _padded(group.cost(part, by_stage[stage % place.depth]), schedule)
    return Keeping(tuple(ways), tuple(peaks), tuple(costs))


@dataclass(frozen=True)
class _Group:
    """Ranks that hold copies of the same stages; mostly one rank alone.

    Attributes:
        stages: of one copy.
        parts: each of their stages, copies included.
        seconds: of each action of each rank.
        running: what is there during each of them besides what microbatches keep.
    """

    demand: Demand
    stages: tuple[int, ...]
    on_rank: Mapping[int, tuple[int, ...]]
    parts: Mapping[int, OfRank]
    seconds: Mapping[int, Floats]
    running: Mapping[int, Floats]

    @classmethod
    def of(cls, schedule: Schedule, demand: Demand, ranks: Sequence[int]) -> _Group:
        place, depth = schedule.placement, schedule.placement.depth
        on_rank = {rank: place.stages_on(rank) for rank in ranks}
        works = {rank: tuple(action for action in schedule.rows[rank] if action.op.is_compute) for rank in ranks}
        parts = {stage: OfRank(stage, works[rank]) for rank, stages in on_rank.items() for stage in stages}
        seconds = {
            rank: np.array([demand.costs[action.stage % depth].seconds(action.op) for action in work])
            for rank, work in works.items()
        }
        more = demand.besides or [Besides(0.0, 0.0)] * depth
        besides = {rank: running(schedule.rows[rank], demand.costs, more) for rank in ranks}
        return cls(demand, tuple(sorted({stage % depth for stage in parts})), on_rank, parts, seconds, besides)

    def best(self) -> tuple[dict[int, Way], dict[int, float]]:
        """The way of each stage, and what each rank then needs."""
        found = []
        for chosen in _ways(len(self.stages), self.demand.host is not None):
            by_stage = dict(zip(self.stages, chosen, strict=True))
            needed = {rank: self._peak(rank, stages, by_stage) for rank, stages in self.on_rank.items()}
            lacks = lacking([*needed.values()], [self.demand.limits[rank] for rank in needed])
            extra = sum(self._extra(rank, s, by_stage) for rank, stages in self.on_rank.items() for s in stages)
            found.append(((lacks, extra, sum(way is not Way.KEEPS for way in chosen)), by_stage, needed))
        _, by_stage, needed = min(found, key=lambda one: one[0])
        return by_stage, needed

    def cost(self, part: OfRank, way: Way) -> OfStage:
        """What a stage costs."""
        rank = next(rank for rank, stages in self.on_rank.items() if part.stage in stages)
        return self._cost(part, way, rank)

    def _cost(self, part: OfRank, way: Way, rank: int) -> OfStage:
        cost, again = self._plain(part.stage), self.demand.again_seconds
        once_more = again[part.stage % len(again)] if again else cost.forward_seconds
        return part.cost(way, cost, once_more, self.seconds[rank], self.demand.host)

    def _plain(self, stage: int) -> StageCost:
        return self.demand.costs[stage % len(self.demand.costs)]

    def _peak(self, rank: int, stages: Sequence[int], ways: Mapping[int, Way]) -> float:
        depth, costs = len(self.demand.costs), [self._plain(stage) for stage in stages]
        constant = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in costs)
        courses = [
            self.parts[stage].held(ways[stage % depth], cost, self.demand.input_bytes[stage % depth])
            for stage, cost in zip(stages, costs, strict=True)
        ]
        return constant + float((np.sum(courses, axis=0) + self.running[rank]).max(initial=0.0))

    def _extra(self, rank: int, stage: int, ways: Mapping[int, Way]) -> float:
        """The seconds that a way adds to a rank's work."""
        part, cost, way = self.parts[stage], self._plain(stage), ways[stage % len(self.demand.costs)]
        each = self._cost(part, way, rank)
        own = [] if isinstance(each, StageCost) else [each[number] for number in part.places]
        return sum(
            one.forward_seconds - cost.forward_seconds + one.backward_seconds - cost.backward_seconds for one in own
        )


def _padded(cost: OfStage, schedule: Schedule) -> OfStage:
    """One cost for each microbatch of the schedule: a copy of the model has only some."""
    if isinstance(cost, StageCost):
        return cost
    each = tuple(cost)
    return (*each, *(each[-1:] * (schedule.microbatches - len(each))))


def _together(schedule: Schedule) -> list[list[int]]:
    """The ranks in groups that share no stage, not even copies of one."""
    place = schedule.placement
    groups: list[tuple[set[int], set[int]]] = []
    for rank, stages in enumerate(place.by_rank):
        own = {stage % place.depth for stage in stages}
        met = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        groups.append(({rank}.union(*(g[0] for g in met)), own.union(*(g[1] for g in met))))
    return [sorted(ranks) for ranks, _ in groups]


def _ways(stages: int, can_offload: bool) -> Iterator[tuple[Way, ...]]:
    """All ways of so many stages, keeping everything first."""
    open_ = [way for way in Way if can_offload or way is not Way.OFFLOADS]
    if len(open_) ** stages > MAX_WAYS:
        return iter([(way,) * stages for way in open_])
    return product(open_, repeat=stages)


def lacking(peak_bytes: Sequence[float], limits: Sequence[float]) -> float:
    """What the rank that lacks most needs beyond its memory; 0 if all fit."""
    return max((max(0.0, peak - limit) for peak, limit in zip(peak_bytes, limits, strict=True)), default=math.inf)

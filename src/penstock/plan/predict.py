"""What a choice takes: its cuts, the time of a step and the memory of each rank, by the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from penstock.balance import Problem, UnitCost, best_starts
from penstock.plan.choice import Choice
from penstock.plan.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.schedule import Op, Row, Schedule, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, idle, memory, simulate


@dataclass(frozen=True, slots=True)
class Cut:
    """Units divided into stages.

    Attributes:
        starts: the index of the unit with which each stage begins.
        costs: of each stage, if nothing is recomputed.
    """

    starts: tuple[int, ...]
    costs: tuple[StageCost, ...]


def cut(units: Sequence[UnitCost], stages: int, cluster: Cluster) -> Cut:
    """Where the slowest stage is fastest, with what it sends over the cluster's link.

    Raises:
        ArgumentError: there are fewer units than stages.
    """
    link = cluster.link
    crossing = [link.seconds(unit.boundary_bytes) + link.seconds(unit.boundary_gradient_bytes) for unit in units]
    starts = best_starts(Problem([unit.seconds for unit in units], crossing), stages)
    ends = [*starts[1:], len(units)]
    pieces = [units[start:end] for start, end in zip(starts, ends, strict=True)]
    sent = [units[end].boundary_bytes if end < len(units) else 0 for end in ends]
    return Cut(tuple(starts), tuple(_stage(piece, output) for piece, output in zip(pieces, sent, strict=True)))


def _stage(units: Sequence[UnitCost], output_bytes: float) -> StageCost:
    activations = sum(unit.activation_bytes for unit in units)
    return StageCost(
        sum(unit.forward_seconds for unit in units),
        sum(unit.input_gradient_seconds for unit in units),
        sum(unit.weight_gradient_seconds for unit in units),
        output_bytes=output_bytes,
        activation_bytes=activations,
        weight_gradient_bytes=activations,  # a profile does not say what W needs of it: at most all
        parameter_bytes=sum(unit.parameter_bytes for unit in units),
        gradient_bytes=sum(unit.gradient_bytes for unit in units),
        optimizer_bytes=sum(unit.optimizer_bytes for unit in units),
    )


def least_seconds(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """No order of these actions is faster: a rank does its work, and begins after the stages before its first one.

    Args:
        schedule: whatever its order is.
        costs: of each stage, copies included.
    """
    before = [0.0, *accumulate(cost.forward_seconds for cost in costs)]
    placement = schedule.placement
    seconds = []
    for rank, row in enumerate(schedule.rows):
        work = sum(_seconds(costs[stage]).get(op, 0.0) * count for (op, stage), count in _counts(row).items())
        starts = [before[stage] - before[stage - stage % placement.depth] for stage in placement.stages_on(rank)]
        seconds.append(work + min(starts, default=0.0))
    return max(seconds)


def predict(choice: Choice, units: Sequence[UnitCost], cluster: Cluster, where: Cut) -> Plan:
    """The plan with these cuts, that recomputes as few stages as fit; if none fits, all of them."""
    schedule = order_of(choice)
    plain = _copies(schedule, where.costs)
    links = cluster.pipeline_links(choice.ranks, choice.replicas, choice.inner)
    timeline = simulate(schedule, plain, links)
    inputs = [units[start].boundary_bytes for start in where.starts]
    again = _recomputed(schedule, where, inputs, timeline, cluster.memory_bytes)
    costs = _copies(
        schedule,
        [_recomputing(cost, inputs[stage]) if stage in again else cost for stage, cost in enumerate(where.costs)],
    )
    timeline = simulate(schedule, costs, links) if again else timeline
    held = _peaks(schedule, where, inputs, timeline, again)
    reduces = [_reduce_seconds(choice, schedule, rank, costs, cluster) for rank in range(choice.ranks)]
    lost: dict[str, float] = {}
    available = timeline.makespan_seconds * choice.ranks
    for by_cause in idle(schedule, timeline):
        for cause, seconds in by_cause.items():
            lost[cause.value] = lost.get(cause.value, 0.0) + (seconds / available if available else 0.0)
    return Plan(
        choice,
        tuple(units[start].name for start in where.starts[1:]),
        again,
        tuple(cost.forward_seconds + cost.backward_seconds for cost in costs[: len(where.costs)]),
        timeline.makespan_seconds,
        max(reduces),
        {cause: share for cause, share in lost.items() if share > 0},
        tuple(held),
        cluster.memory_bytes,
    )


def _reduce_seconds(
    choice: Choice, schedule: Schedule, rank: int, costs: Sequence[StageCost], cluster: Cluster
) -> float:
    """The sums of a rank's gradients after the last backward: over replicas, and over copies of the model."""
    size = sum(costs[stage].gradient_bytes for stage in schedule.placement.stages_on(rank))
    over_replicas = cluster.reduce_seconds(rank, choice.ranks, choice.replicas, choice.inner, size)
    copies = schedule.placement.pipelines
    return over_replicas + (2 * (copies - 1) * cluster.link.seconds(size / copies) if copies > 1 else 0.0)


@lru_cache(maxsize=64)
def order_of(choice: Choice) -> Schedule:
    """The order of work that was chosen."""
    return generate(choice.schedule, choice.ranks, choice.microbatches, choice.chunks)


def _copies(schedule: Schedule, costs: Sequence[StageCost]) -> list[StageCost]:
    """A cost for each stage, copies of the model included."""
    return list(costs) * schedule.placement.pipelines


def _counts(row: Row) -> Counter[tuple[int, int]]:
    """How often a rank runs which op (by code) of which stage."""
    return Counter(zip(row.op, row.stage, strict=True))


def _seconds(cost: StageCost) -> dict[int, float]:
    """What each op takes, by its code."""
    return {
        Op.F.code: cost.forward_seconds,
        Op.B.code: cost.backward_seconds,
        Op.I.code: cost.backward_input_seconds,
        Op.W.code: cost.backward_weight_seconds,
    }


def _recomputing(cost: StageCost, input_bytes: float) -> StageCost:
    """The stage if it keeps its input only, and runs its forward again before its backward."""
    return replace(
        cost,
        backward_input_seconds=cost.backward_input_seconds + cost.forward_seconds,
        activation_bytes=input_bytes,
        weight_gradient_bytes=input_bytes,
    )


def _recomputed(
    schedule: Schedule, where: Cut, inputs: Sequence[float], timeline: Timeline, limit: float
) -> tuple[int, ...]:
    """The stages to recompute: on the fullest rank, whichever frees most, until all ranks fit or nothing frees more."""
    again: set[int] = set()
    depth = schedule.placement.depth
    while True:
        held = _peaks(schedule, where, inputs, timeline, sorted(again))
        fullest = max(range(len(held)), key=held.__getitem__)
        if held[fullest] <= limit:
            return tuple(sorted(again))
        on_it = {stage % depth for stage in schedule.placement.stages_on(fullest)} - again
        then = {s: _peaks(schedule, where, inputs, timeline, [*again, s])[fullest] for s in on_it}
        best = min(then, key=then.__getitem__, default=None)
        if best is None or then[best] >= held[fullest]:
            return tuple(sorted(again))
        again.add(best)


def _peaks(
    schedule: Schedule, where: Cut, inputs: Sequence[float], timeline: Timeline, again: Sequence[int]
) -> list[float]:
    """The most that each rank needs if these stages are recomputed: it depends on the timeline's order, not its times.

    While a stage is recomputed, one microbatch's activations are there besides what is kept. If its backward is split,
    W needs some of them, at most all: those of each microbatch between I and W are taken to be there.
    """
    costs = [_recomputing(cost, inputs[s]) if s in again else cost for s, cost in enumerate(where.costs)]
    depth = schedule.placement.depth
    again_bytes = {s: where.costs[s % depth].activation_bytes for s in range(schedule.stages) if s % depth in again}
    working = [_working(row, again_bytes) for row in schedule.rows]
    held = memory(schedule, _copies(schedule, costs), timeline)
    return [one.peak + extra for one, extra in zip(held, working, strict=True)]


def _working(row: Row, again_bytes: Mapping[int, float]) -> float:
    """The most that recomputed forwards leave on a rank at once, from their I (or B) to the end of their W (or B)."""
    now = most = 0.0
    for op, stage in zip(row.op, row.stage, strict=True):
        size = again_bytes.get(stage, 0.0)
        if op == Op.I.code:
            now += size
        most = max(most, now + (size if op == Op.B.code else 0.0))
        if op == Op.W.code:
            now -= size
    return most

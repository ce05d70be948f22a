"""What a choice takes: its cuts, the time of a step and the memory of each rank, by the simulator."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from penstock._base.errors import ArgumentError
from penstock.costs import CutProblem, UnitCost, best_cuts, tied_bytes_overcount
from penstock.costs.stage_costs import add_memory, build_cut_problem, price_stages
from penstock.plan.activation_policy import (
    Demand,
    Policy,
    Transient,
    choose_policies,
    tied_overcounts,
    transient_by_rank,
)
from penstock.plan.cluster import Cluster, DevicePool
from penstock.plan.layout import Grid, Traffic, assign_devices, links_between, rings_cross_hosts
from penstock.plan.parallel_configs import ParallelConfig
from penstock.plan.plan import Plan
from penstock.schedule import Op, Placement, Schedule, generate, in_flight_by_stage
from penstock.schedule.timeline import Timeline
from penstock.simulate import Links, StageCost, idle_time_by_cause, simulate


@dataclass(frozen=True)
class Cut:
    """Units divided into stages, for devices of these kinds.

    Attributes:
        cluster: whose devices they are.
        units: of the whole model.
        kinds: of the device of each rank of each replica: of a rank's replicas, the slowest counts.
        speeds: how fast each stage's device is; of its replicas and copies, the slowest.
        starts: the index of the unit with which each stage begins.
    """

    cluster: Cluster
    units: Sequence[UnitCost]
    kinds: Grid
    speeds: Sequence[float]
    starts: Sequence[int] = ()

    def with_starts(self, starts: Sequence[int]) -> Cut:
        """Return the same, cut at these units."""
        return replace(self, starts=tuple(starts))

    @property
    def problem(self) -> CutProblem:
        """What to balance."""
        return build_cut_problem(self.units, self.cluster.link, [] if {*self.speeds} == {1.0} else self.speeds)

    @property
    def pieces(self) -> list[Sequence[UnitCost]]:
        """The units of each stage."""
        return [self.units[start:end] for start, end in pairwise([*self.starts, len(self.units)])]

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Of each stage, on its device, if nothing is recomputed."""
        return price_stages(self.units, self.starts, self.cluster.action_seconds, self.speeds)

    @property
    def recompute_seconds(self) -> list[float]:
        """What the forward of each stage takes when it runs again."""
        pairs = zip(self.pieces, self.speeds, strict=True)
        return [sum(unit.again_seconds for unit in piece) / speed for piece, speed in pairs]

    @property
    def rank_pools(self) -> list[list[DevicePool]]:
        """The kinds of the devices that run each rank."""
        return [[self.cluster.kinds[kind] for kind in column] for column in self.kinds.T.tolist()]

    @property
    def rank_speeds(self) -> list[float]:
        """How fast each rank's device is; of its replicas, the slowest."""
        return [min(kind.speed for kind in column) for column in self.rank_pools]

    @property
    def limits(self) -> tuple[float, ...]:
        """The memory of each rank's devices: of its replicas, the smallest counts."""
        return tuple(min(kind.memory_bytes for kind in column) for column in self.rank_pools)

    def may_hold(self, placement: Placement) -> bool:
        """Whether ranks could at least hold what is there all the time, wherever the model is cut."""
        sizes = [unit.held_bytes for unit in self.units]
        static_bytes = placement.pipelines * (sum(sizes) - sum(tied_bytes_overcount(self.units)))
        return static_bytes <= sum(self.limits) and max(sizes) <= max(self.limits)


def cut_model(units: Sequence[UnitCost], placement: Placement, cluster: Cluster, kinds: Grid) -> Cut:
    """Cut the units so that the slowest stage is fastest, with what it sends over the cluster's link. Raise
    ArgumentError if there are fewer units than stages."""
    depth, uncut = placement.depth, Cut(cluster, units, kinds, ())
    stage_speeds = [uncut.rank_speeds[rank] for rank in placement.rank_of]
    with_speeds = replace(uncut, speeds=[min(stage_speeds[stage::depth]) for stage in range(depth)])
    return with_speeds.with_starts(best_cuts(with_speeds.problem, depth))


def cuts_within_memory(cut: Cut, schedule: Schedule) -> Iterator[Cut]:
    """Yield other cuts within the memory of the devices, with as many microbatches in flight as the schedule has, where
    stages recompute forwards if they have to; or, if no cut fits, those whose fullest stage is least full. Yield none
    if the devices differ in memory.

    What ranks with several stages, or with weight gradients that wait, then need is known less well: cuts where no
    forward runs again come first.
    """
    placement, limits, units = schedule.placement, cut.limits, cut.units
    if len({*limits}) > 1:
        return
    keep_all = replace(
        add_memory(cut.problem, units, schedule.microbatches),
        in_flight=in_flight_by_stage(schedule)[: placement.depth],
        limit_bytes=limits[0] / max(map(len, placement.by_rank)),
    )
    recomputing = replace(
        keep_all,
        again_seconds=[unit.again_seconds for unit in units],
        received_bytes=[unit.boundary_bytes for unit in units],
        waiting_bytes=[unit.waiting_bytes for unit in units],
        waiting=in_flight_by_stage(schedule, since=Op.I),
    )
    even_memory = replace(keep_all, limit_bytes=math.inf, balanced="bytes")
    strict = (keep_all, even_memory) if schedule.splits or placement.stages > placement.ranks else ()
    problems = (*strict, recomputing) if cut.may_hold(placement) else ()
    for problem in (*problems, replace(even_memory, in_flight=())):
        with suppress(ArgumentError):
            yield cut.with_starts(best_cuts(problem, placement.depth))


def predict(choice: ParallelConfig, cut: Cut) -> Plan:
    """Build the plan with the schedule that the configuration names."""
    return build_plan(choice, schedule_for_config(choice), cut)


def build_plan(choice: ParallelConfig, schedule: Schedule, cut: Cut) -> Plan:
    """Build the plan with this schedule and these cuts, whose ranks keep the activations that they have memory for."""
    placement, depth, cluster, units = schedule.placement, schedule.placement.depth, cut.cluster, cut.units
    devices, links = arrange_devices(schedule, cut)
    batch_bytes, overcounts, transient = transient_memory(schedule, cut)
    timeline = simulate(schedule, [*cut.costs] * placement.pipelines, links)
    chosen = choose_policies(
        schedule,
        Demand(
            cut.costs,
            [units[start].boundary_bytes for start in cut.starts],
            cluster.offload_link,
            [limit - batch for limit, batch in zip(cut.limits, batch_bytes, strict=True)],
            cut.recompute_seconds,
            transient,
        ),
    )
    by_policy = {kind: tuple(s for s, policy in enumerate(chosen.policies) if policy is kind) for kind in Policy}
    if len(by_policy[Policy.KEEPS]) < depth:
        timeline = simulate(schedule, chosen.costs, links)
    gradients = [cost.gradient_bytes for cost in cut.costs]
    end = reduce_end(schedule, timeline, gradients, cluster, rings_cross_hosts(cluster, devices), choice.replicas)
    states = [sum(cut.costs[stage % depth].optimizer_bytes for stage in stages) for stages in placement.by_rank]
    updates = [size / speed for size, speed in zip(states, cut.rank_speeds, strict=True)]
    flat = devices.ravel().tolist()
    return Plan(
        choice,
        tuple(units[start].name for start in cut.starts[1:]),
        by_policy[Policy.RECOMPUTES],
        tuple(cost.forward_seconds + cost.backward_seconds for cost in cut.costs),
        timeline.makespan_seconds,
        end - timeline.makespan_seconds,
        _idle_shares(schedule, timeline),
        tuple(peak + batch for peak, batch in zip(chosen.peak_bytes, batch_bytes, strict=True)),
        cut.limits,
        held_bytes=tuple(
            sum(cut.costs[stage % depth].held_bytes for stage in stages) - overcount
            for stages, overcount in zip(placement.by_rank, overcounts, strict=True)
        ),
        offload=by_policy[Policy.OFFLOADS],
        devices=() if flat == sorted(flat) else tuple(flat),
        optimizer_seconds=cluster.optimizer_byte_seconds * max(updates),
    )


def transient_memory(schedule: Schedule, cut: Cut) -> tuple[list[float], list[float], list[Transient]]:
    """Return what each rank needs for the batch, less what its stages count more than once for tied parameters; the
    latter alone; and the transient memory of each stage."""
    transient = [Transient.from_units(piece, splits=schedule.splits) for piece in cut.pieces]
    overcounts = tied_overcounts(schedule.placement, cut.pieces)
    by_rank = transient_by_rank(schedule.placement, schedule.microbatches, transient)
    return [memory.batch - extra for memory, extra in zip(by_rank, overcounts, strict=True)], overcounts, transient


def arrange_devices(schedule: Schedule, cut: Cut) -> tuple[Grid, Links]:
    """Return the best assignment of devices, and what messages between two ranks then cost."""
    traffic = _traffic(schedule, cut)
    devices = assign_devices(cut.cluster, cut.kinds, traffic)
    return devices, links_between(cut.cluster, devices, sorted(traffic.messages))


def _traffic(schedule: Schedule, cut: Cut) -> Traffic:
    """Return what a step sends."""
    placement = schedule.placement
    messages = defaultdict[tuple[int, int], float](float)
    gradients = [0.0] * placement.ranks
    for stage in range(placement.stages):
        rank = placement.rank_of[stage]
        gradients[rank] += cut.costs[stage % placement.depth].gradient_bytes
        if placement.is_first(stage):
            continue
        unit = cut.units[cut.starts[stage % placement.depth]]
        pair = min(placement.rank_of[stage - 1], rank), max(placement.rank_of[stage - 1], rank)
        if pair[0] != pair[1]:
            count = len(placement.microbatches_of(stage, schedule.microbatches))
            messages[pair] += count * (unit.boundary_bytes + unit.boundary_gradient_bytes)
    return Traffic(messages, gradients)


def _idle_shares(schedule: Schedule, timeline: Timeline) -> dict[str, float]:
    """Return the share of all ranks' time that is lost, by cause."""
    available, shares = timeline.makespan_seconds * schedule.ranks or math.inf, defaultdict[str, float](float)
    for by_cause in idle_time_by_cause(schedule, timeline):
        for cause, seconds in by_cause.items():
            shares[cause.value] += seconds / available
    return {cause: share for cause, share in shares.items() if share > 0}


def schedule_for_plan(plan: Plan) -> Schedule:
    """Return the schedule that a plan names or contains."""
    return schedule_for_config(plan.choice) if isinstance(plan.schedule, str) else plan.schedule


@lru_cache(maxsize=64)
def schedule_for_config(choice: ParallelConfig) -> Schedule:
    """Return the schedule of a configuration."""
    return generate(choice.schedule, choice.ranks, choice.microbatches, choice.chunks)


def reduce_end(
    schedule: Schedule,
    timeline: Timeline,
    gradient_bytes: Sequence[float],
    cluster: Cluster,
    crossed: Sequence[bool],
    replicas: int,
) -> float:
    """Return when the last gradient all-reduce ends; the makespan if there is none.

    The runtime sums stage by stage, beside the work that is left, and a rank's sums follow one another. A stage's
    begins when its last backward has ended; that of a stage with copies when the copies' have, too, and its sum over
    replicas comes after the whole pipeline's work.

    Args:
        gradient_bytes: of each stage of one copy.
        crossed: for each rank, whether its replicas are on several hosts.
        replicas: how many there are.
    """
    placement = schedule.placement
    backward_end: dict[int, float] = {}  # when each stage's last B or W ends
    for track in timeline.tracks:
        for op, stage, end in zip(track.actions.op, track.actions.stage, track.end, strict=True):
            if op in (Op.B.code, Op.W.code):
                backward_end[stage] = max(backward_end.get(stage, 0.0), end)
    free = [0.0] * placement.ranks
    if placement.pipelines > 1:
        for stage in range(placement.depth):
            holders = sorted({placement.rank_of[copy] for copy in range(stage, placement.stages, placement.depth)})
            if len(holders) > 1:
                ends = [backward_end.get(copy, 0.0) for copy in range(stage, placement.stages, placement.depth)]
                begin = max(*ends, *(free[rank] for rank in holders))
                seconds = cluster.ring_seconds(gradient_bytes[stage], len(holders), crosses=False)
                for rank in holders:
                    free[rank] = begin + seconds
        backward_end = dict.fromkeys(backward_end, timeline.makespan_seconds)
    for stage, end in sorted(backward_end.items(), key=lambda item: item[1]):
        rank = placement.rank_of[stage]
        size = gradient_bytes[stage % placement.depth]
        free[rank] = max(free[rank], end) + cluster.ring_seconds(size, replicas, crosses=crossed[rank])
    return max(timeline.makespan_seconds, *free)

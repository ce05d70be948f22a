"""The search for the best plans: every open choice, the most promising first, until a bound says that none wins."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

from penstock._base.errors import ArgumentError
from penstock._base.second_names import formerly
from penstock.costs import UnitCost, variation
from penstock.costs.sizes import Sizes
from penstock.costs.stage_costs import stage_cost
from penstock.plan.cluster import Cluster
from penstock.plan.layout import kinds_of_ranks
from penstock.plan.options import ANY, FixedNumbers, ParallelConfig, enumerate_configs
from penstock.plan.plan import Plan
from penstock.plan.predict import Cut, arranged, cut, cuts_within, order_of, planned, predict, transient_of
from penstock.schedule import Schedule
from penstock.simulate import StageCost
from penstock.simulate.search import search


def least_seconds(choice: ParallelConfig, costs: Sequence[StageCost], sums: Sequence[float]) -> float:
    """Return a lower bound for any order of these actions: a rank begins after the forwards of the stages before its
    lowest, does its work, and is followed by the backwards of those stages; a stage's gradients are reduced after its
    last backward.

    Args:
        choice: of which only what its schedule has before it is made counts.
        costs: of each stage, copies included.
        sums: the seconds that summing each stage's gradients over replicas takes, copies included.
    """
    placement, splits = choice.placement, choice.splits
    on_the_way = [cost.backward_input_seconds if splits else cost.backward_seconds for cost in costs]
    last = [cost.backward_weight_seconds if splits else 0.0 for cost in costs]  # of a copy's first stage
    forwards = [0.0, *accumulate(cost.forward_seconds for cost in costs)]
    backwards = [0.0, *accumulate(on_the_way)]
    times = [len(placement.microbatches_of(stage, choice.microbatches)) for stage in range(placement.stages)]
    least = 0.0
    for stages in placement.by_rank:
        pairs = [(stage, stage - stage % placement.depth) for stage in stages]
        before = min(forwards[stage] - forwards[first] for stage, first in pairs)
        after = min(backwards[stage] - backwards[first] + last[first] + sums[first] for stage, first in pairs)
        work = sum(times[s] * (costs[s].forward_seconds + costs[s].backward_seconds) for s in stages)
        passed = sum(times[s] * (costs[s].forward_seconds + on_the_way[s]) for s in stages)
        least = max(least, before + work + min(sums[stage] for stage in stages), before + passed + after)
    return least


def least_seconds_anyhow(choice: ParallelConfig, units: Sequence[UnitCost], speeds: Sequence[float]) -> float:
    """Return a lower bound for any order of the actions of any cut.

    A microbatch takes its whole way. And of the ranks, some need at least the mean. If each has one stage, the one
    after stages of P seconds waits for these and then works for m times its own; all of them end together at the
    earliest if each is (T - P) / m, so that T is the whole divided by 1 - (1 - 1/m)^p.

    Args:
        speeds: of each rank's device.
    """
    placement, count, fastest = choice.placement, choice.microbatches, max(speeds)
    whole = sum(unit.seconds for unit in units)
    passed = sum(unit.forward_seconds + unit.input_gradient_seconds for unit in units)
    on_the_way = passed if choice.splits else whole
    least = max(count * whole / sum(speeds), on_the_way / fastest)
    if placement.stages == placement.ranks:
        least = max(least, on_the_way / fastest / (1 - (1 - 1 / count) ** placement.ranks))
    return least


BEST = 5
"""How many plans to list."""

EQUAL, OF_VARIATION, MOST_EQUAL = 0.005, 0.25, 0.1
"""Steps that differ by less are taken as equal, since no profile tells them apart: by the first fraction, or, if that
is more, by this part of what the profile's times vary, up to the last. The simplest such plan comes first.
"""

ROUNDING = 1e-9
"""So much lower is a bound, relatively: sums in another order differ."""

FINALISTS = 3
"""For so many of the best plans, of different sizes, better orders of work are searched for."""


@dataclass(frozen=True, slots=True)
class RejectedConfig:
    """A choice that is not among the best.

    Attributes:
        choice: what was not chosen.
        step_seconds: what a step takes; if it was not simulated, a lower bound.
        bubble: the share of time lost; None if it was not simulated.
        lacking_bytes: what the fullest rank needs beyond its memory.
        recomputed: how many stages are recomputed.
        reduce_seconds: what the sums of replicas' gradients take of the step.
        offloaded: how many stages are offloaded.
    """

    choice: ParallelConfig
    step_seconds: float
    bubble: float | None = None
    lacking_bytes: float = 0.0
    recomputed: int = 0
    reduce_seconds: float = 0.0
    offloaded: int = 0


@formerly(lost="rejected", nearest="closest")
@dataclass(frozen=True, slots=True)
class PlanResult:
    """What was found.

    Attributes:
        best: the plans that fit, the fastest first; of those as good as equal to it, the simplest first. The fastest is
            among them.
        rejected: the other choices, the fastest first.
        closest: if nothing fits, the plan that lacks least.
        equal: the fraction by which steps may differ to be as good as equal.
    """

    best: tuple[Plan, ...]
    rejected: tuple[RejectedConfig, ...]
    closest: Plan | None = None
    equal: float = EQUAL


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice with its cuts, and a time below which its step cannot be."""

    choice: ParallelConfig
    where: Cut
    at_least: float

    def best(self) -> tuple[Plan, Cut]:
        """Return the better of two plans: with the fastest cuts, and, if these leave a rank short of memory, with cuts
        that fit."""
        found = [(predict(self.choice, self.where), self.where)]
        if found[0][0].recompute or found[0][0].offload or found[0][0].lacking_bytes:
            for other in cuts_within(self.where, order_of(self.choice)):
                if other.starts != self.where.starts:
                    found.append((predict(self.choice, other), other))
                if not found[-1][0].lacking_bytes:
                    break
        return min(found, key=lambda one: (one[0].lacking_bytes, one[0].step_seconds))


def make_plans(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    wanted: FixedNumbers = ANY,
    best: int = BEST,
    search_seconds: float = 0.0,
) -> PlanResult:
    """Find the fastest configurations that use all devices and fit in their memory.

    Choices are simulated in the order of a lower bound of their time, until that is above the time of the last of the
    best. So no choice is better than those found, by this prediction.

    Args:
        sizes: what the model's units cost.
        cluster: the devices.
        global_batch: the rows of one step, over all replicas.
        wanted: what plans must have.
        best: how many plans to find.
        search_seconds: how long to search, roughly, for orders of work that beat the named schedules of the best plans.

    Raises:
        ArgumentError: the batch cannot be divided, or no plan is as wanted.
    """
    found: list[Plan] = []
    lost: list[RejectedConfig] = []
    nearest: Plan | None = None
    candidates = sorted(open_candidates(sizes, cluster, global_batch, wanted), key=lambda one: one.at_least)
    kept: dict[int, Cut] = {}
    equal = min(MOST_EQUAL, max(EQUAL, OF_VARIATION * max(map(variation, sizes.profiles.values()))))
    for number, candidate in enumerate(candidates):
        times = sorted(map(_seconds, found))
        if len(found) >= best and candidate.at_least >= max((1 + equal) * times[0], times[best - 1]):
            lost += [RejectedConfig(one.choice, one.at_least) for one in candidates[number:]]
            break
        plan, where = candidate.best()
        if plan.lacking_bytes:
            nearest = min((nearest or plan, plan), key=lambda one: one.lacking_bytes)
            lost.append(_as_lost(plan))
        else:
            found.append(plan)
            kept[id(plan)] = where
    ranked = simplest_first(found, equal)
    if search_seconds > 0:
        ranked = simplest_first([*found, *_finer(ranked, kept, search_seconds)], equal)
    fastest = min(ranked, key=_seconds, default=None)
    if fastest is not None and fastest not in ranked[:best]:
        ranked = [*ranked[: best - 1], fastest, *(one for one in ranked[best - 1 :] if one is not fastest)]
    lost += map(_as_lost, ranked[best:])
    made_for = next(iter(sizes.profiles.values())).made_for
    return PlanResult(
        tuple(replace(plan, made_for=made_for) for plan in ranked[:best]),
        tuple(sorted(lost, key=lambda one: one.step_seconds)),
        None if found or nearest is None else replace(nearest, made_for=made_for),
        equal,
    )


def open_candidates(sizes: Sizes, cluster: Cluster, global_batch: int, wanted: FixedNumbers) -> Iterator[Candidate]:
    """Yield every configuration for every order of the device pools."""
    cuts: dict[Hashable, Cut] = {}
    ring = cluster.least_ring_seconds
    for choice in enumerate_configs(sizes, cluster, global_batch, wanted):
        units, placement = sizes.shared_by(choice.replicas).at(choice.rows), choice.placement
        units = tuple(unit.split for unit in units) if choice.splits else units
        for kinds in kinds_of_ranks(cluster, choice.replicas, choice.ranks):
            alike = placement if len(cluster.kinds) > 1 else choice.stages
            key = (choice.rows, choice.splits, alike, kinds.shape, kinds.tobytes())
            where = cuts.get(key) or cuts.setdefault(key, cut(units, placement, cluster, kinds))
            pipelines, sums = placement.pipelines, [ring(cost.gradient_bytes, choice.replicas) for cost in where.costs]
            least = least_seconds(choice, [*where.costs] * pipelines, sums * pipelines)
            if cluster.has_limit:  # with other cuts, too
                least = min(least, least_seconds_anyhow(choice, where.units, where.rank_speeds))
            # Of some rank at least the mean.
            updated = pipelines * stage_cost(where.units, 0).optimizer_bytes / sum(where.rank_speeds)
            at_least = (least + cluster.optimizer_byte_seconds * updated) * (1 - ROUNDING)
            yield Candidate(choice, where, at_least)


def _finer(ranked: Sequence[Plan], cuts: Mapping[int, Cut], seconds: float) -> Iterator[Plan]:
    """Plans whose order of work was searched for, with the sizes and cuts of the best, where that makes them faster.

    Args:
        cuts: of each plan, by its id.
    """
    finalists: dict[Hashable, Plan] = {}
    for plan in ranked:
        choice, placement = plan.choice, order_of(plan.choice).placement
        if choice.ranks > 1 and placement.pipelines == 1 and len(finalists) < FINALISTS:
            finalists.setdefault((placement, choice.replicas, choice.rows), plan)
    for plan in finalists.values():
        where = cuts[id(plan)]
        where = replace(where, units=tuple(unit.split for unit in where.units))  # whatever its own order has
        order = searched(order_of(plan.choice), where, seconds / len(finalists))
        if order is not None:
            made = planned(replace(plan.choice, schedule=order.name), order, where)
            if not made.lacking_bytes and made.step_seconds < plan.step_seconds:
                yield replace(made, order=str(order))


def _as_lost(plan: Plan) -> RejectedConfig:
    return RejectedConfig(
        plan.choice,
        plan.step_seconds,
        plan.bubble,
        plan.lacking_bytes,
        len(plan.recompute),
        plan.reduce_seconds,
        len(plan.offload),
    )


_seconds = attrgetter("step_seconds")


def simplest_first(plans: Sequence[Plan], equal: float) -> list[Plan]:
    """Sort plans by time; those practically as fast as the fastest by simplicity."""
    ranked = sorted(plans, key=_seconds)
    alike = [plan for plan in ranked if plan.step_seconds <= (1 + equal) * ranked[0].step_seconds]
    return [*sorted(alike, key=_complexity), *ranked[len(alike) :]]


def _complexity(plan: Plan) -> tuple[float, ...]:
    """Copies of the model, an order without a name, chunks, a split backward, stages that do not keep, ranks."""
    known = plan.choice if isinstance(plan.schedule, str) else plan.schedule
    more = len(plan.recompute) + len(plan.offload)
    numbers = known.placement.pipelines, bool(plan.order), plan.choice.chunks, known.splits, more, plan.choice.ranks
    return (*numbers, plan.step_seconds, max(plan.memory_bytes))


MAX_ACTIONS = 6000
"""Of an order worth searching: longer ones take minutes, and gain less."""


def searched(schedule: Schedule, where: Cut, seconds: float) -> Schedule | None:
    """Search for the best order of the same stages on the same ranks that keeps all activations within memory; None if
    a named schedule is as good.

    Args:
        schedule: whose placement and microbatches are kept.
    """
    placement = schedule.placement
    if 3 * placement.stages * schedule.microbatches > MAX_ACTIONS:
        return None
    room, (more, _, transient) = [], transient_of(schedule, where)
    for rank, limit in enumerate(where.limits):
        own = [stage % placement.depth for stage in placement.stages_on(rank)]
        held = sum(where.costs[stage].held_bytes for stage in own)
        runs = (transient[stage] for stage in own)  # in any order, with all gradients there
        running = max(max(one.working, one.first_inputs - one.early_bytes) for one in runs)
        room.append(limit - more[rank] - held - running)
    try:
        found = search(
            placement,
            schedule.microbatches,
            where.costs,
            arranged(schedule, where)[1],
            memory_limit=None if min(room) == math.inf else room,
            objective="makespan",
            seconds=seconds,
        )
    except ArgumentError:  # a rank has no room for even one microbatch
        return None
    return found.schedule if found.schedule.name == "search" else None

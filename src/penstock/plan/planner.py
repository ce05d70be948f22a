"""The search for the best plans: every open choice, the most promising first, until a bound says that none wins."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError
from penstock.costs import UnitCost, variation
from penstock.costs.sizes import Sizes
from penstock.costs.stage_costs import stage_cost
from penstock.plan.cluster import Cluster
from penstock.plan.layout import assign_pools
from penstock.plan.parallel_configs import ANY, FixedNumbers, ParallelConfig, enumerate_configs
from penstock.plan.plan import Plan
from penstock.plan.predict import (
    Cut,
    arrange_devices,
    build_plan,
    cut_model,
    cuts_within_memory,
    predict,
    schedule_for_config,
    transient_memory,
)
from penstock.schedule import Schedule
from penstock.simulate import StageCost
from penstock.simulate.search import search


def step_lower_bound(choice: ParallelConfig, costs: Sequence[StageCost], reduces: Sequence[float]) -> float:
    """Return a lower bound for any order of these actions: a rank begins after the forwards of the stages before its
    lowest, does its work, and is followed by the backwards of those stages; a stage's gradients are reduced after its
    last backward.

    Args:
        choice: of which only what its schedule has before it is made counts.
        costs: of each stage, copies included.
        reduces: the seconds that summing each stage's gradients over replicas takes, copies included.
    """
    placement, splits = choice.placement, choice.splits
    path_backwards = [cost.backward_input_seconds if splits else cost.backward_seconds for cost in costs]
    weights = [cost.backward_weight_seconds if splits else 0.0 for cost in costs]  # of a copy's first stage
    forwards = [0.0, *accumulate(cost.forward_seconds for cost in costs)]
    backwards = [0.0, *accumulate(path_backwards)]
    counts = [len(placement.microbatches_of(stage, choice.microbatches)) for stage in range(placement.stages)]
    bound = 0.0
    for stages in placement.by_rank:
        pairs = [(stage, stage - stage % placement.depth) for stage in stages]
        before = min(forwards[stage] - forwards[first] for stage, first in pairs)
        after = min(backwards[stage] - backwards[first] + weights[first] + reduces[first] for stage, first in pairs)
        work = sum(counts[s] * (costs[s].forward_seconds + costs[s].backward_seconds) for s in stages)
        path_work = sum(counts[s] * (costs[s].forward_seconds + path_backwards[s]) for s in stages)
        bound = max(bound, before + work + min(reduces[stage] for stage in stages), before + path_work + after)
    return bound


def lower_bound_any_cut(choice: ParallelConfig, units: Sequence[UnitCost], speeds: Sequence[float]) -> float:
    """Return a lower bound for any order of the actions of any cut.

    A microbatch takes its whole way. And of the ranks, some need at least the mean. If each has one stage, the one
    after stages of P seconds waits for these and then works for m times its own; all of them end together at the
    earliest if each is (T - P) / m, so that T is the whole divided by 1 - (1 - 1/m)^p.

    Args:
        speeds: of each rank's device.
    """
    placement, count, fastest = choice.placement, choice.microbatches, max(speeds)
    total = sum(unit.seconds for unit in units)
    forward_and_input = sum(unit.forward_seconds + unit.input_gradient_seconds for unit in units)
    path_seconds = forward_and_input if choice.splits else total
    bound = max(count * total / sum(speeds), path_seconds / fastest)
    if placement.stages == placement.ranks:
        bound = max(bound, path_seconds / fastest / (1 - (1 - 1 / count) ** placement.ranks))
    return bound


DEFAULT_PLANS = 5
"""How many plans to list."""

EQUAL, VARIATION_SHARE, MAX_EQUAL = 0.005, 0.25, 0.1
"""Steps that differ by less are taken as equal, since no profile tells them apart: by the first fraction, or, if that
is more, by this part of what the profile's times vary, up to the last. The simplest such plan comes first.
"""

ROUNDING = 1e-9
"""Bounds are lowered by this fraction, since sums in another order differ."""

FINALISTS = 3
"""Better schedules are searched for this many of the best plans, of different sizes."""


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


@accept_old_names(lost="rejected", nearest="closest")
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
    cut: Cut
    lower_bound: float

    def best(self) -> tuple[Plan, Cut]:
        """Return the better of two plans: with the fastest cuts, and, if these leave a rank short of memory, with cuts
        that fit."""
        options = [(predict(self.choice, self.cut), self.cut)]
        if options[0][0].recompute or options[0][0].offload or options[0][0].lacking_bytes:
            for cut in cuts_within_memory(self.cut, schedule_for_config(self.choice)):
                if cut.starts != self.cut.starts:
                    options.append((predict(self.choice, cut), cut))
                if not options[-1][0].lacking_bytes:
                    break
        return min(options, key=lambda option: (option[0].lacking_bytes, option[0].step_seconds))


def make_plans(
    sizes: Sizes,
    cluster: Cluster,
    global_batch: int,
    wanted: FixedNumbers = ANY,
    best: int = DEFAULT_PLANS,
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
    fitting: list[Plan] = []
    rejected: list[RejectedConfig] = []
    closest: Plan | None = None
    candidates = sorted(enumerate_candidates(sizes, cluster, global_batch, wanted), key=lambda c: c.lower_bound)
    cuts: dict[int, Cut] = {}
    equal = min(MAX_EQUAL, max(EQUAL, VARIATION_SHARE * max(map(variation, sizes.profiles.values()))))
    for number, candidate in enumerate(candidates):
        times = sorted(map(_seconds, fitting))
        if len(fitting) >= best and candidate.lower_bound >= max((1 + equal) * times[0], times[best - 1]):
            rejected += [RejectedConfig(pruned.choice, pruned.lower_bound) for pruned in candidates[number:]]
            break
        plan, cut = candidate.best()
        if plan.lacking_bytes:
            closest = min((closest or plan, plan), key=lambda p: p.lacking_bytes)
            rejected.append(_reject(plan))
        else:
            fitting.append(plan)
            cuts[id(plan)] = cut
    ranked = simplest_first(fitting, equal)
    if search_seconds > 0:
        ranked = simplest_first([*fitting, *_search_schedules(ranked, cuts, search_seconds)], equal)
    fastest = min(ranked, key=_seconds, default=None)
    if fastest is not None and fastest not in ranked[:best]:
        ranked = [*ranked[: best - 1], fastest, *(plan for plan in ranked[best - 1 :] if plan is not fastest)]
    rejected += map(_reject, ranked[best:])
    fingerprint = next(iter(sizes.profiles.values())).made_for
    return PlanResult(
        tuple(replace(plan, made_for=fingerprint) for plan in ranked[:best]),
        tuple(sorted(rejected, key=_seconds)),
        None if fitting or closest is None else replace(closest, made_for=fingerprint),
        equal,
    )


def enumerate_candidates(sizes: Sizes, cluster: Cluster, global_batch: int, fixed: FixedNumbers) -> Iterator[Candidate]:
    """Yield every configuration for every order of the device pools."""
    cuts: dict[Hashable, Cut] = {}
    ring = cluster.least_ring_seconds
    for choice in enumerate_configs(sizes, cluster, global_batch, fixed):
        units, placement = sizes.shared_by(choice.replicas).at(choice.rows), choice.placement
        units = tuple(unit.split for unit in units) if choice.splits else units
        for kinds in assign_pools(cluster, choice.replicas, choice.ranks):
            cut_key = placement if len(cluster.kinds) > 1 else choice.stages
            key = (choice.rows, choice.splits, cut_key, kinds.shape, kinds.tobytes())
            cut = cuts.get(key) or cuts.setdefault(key, cut_model(units, placement, cluster, kinds))
            pipelines, reduces = placement.pipelines, [ring(cost.gradient_bytes, choice.replicas) for cost in cut.costs]
            bound = step_lower_bound(choice, [*cut.costs] * pipelines, reduces * pipelines)
            if any(kind.memory_bytes < math.inf for kind in cluster.kinds):  # with other cuts, too
                bound = min(bound, lower_bound_any_cut(choice, cut.units, cut.rank_speeds))
            # Of some rank at least the mean.
            updated = pipelines * stage_cost(cut.units, 0).optimizer_bytes / sum(cut.rank_speeds)
            lower_bound = (bound + cluster.optimizer_byte_seconds * updated) * (1 - ROUNDING)
            yield Candidate(choice, cut, lower_bound)


def _search_schedules(ranked: Sequence[Plan], cuts: Mapping[int, Cut], seconds: float) -> Iterator[Plan]:
    """Plans whose order of work was searched for, with the sizes and cuts of the best, where that makes them faster.

    Args:
        cuts: of each plan, by its id.
    """
    finalists: dict[Hashable, Plan] = {}
    for plan in ranked:
        choice, placement = plan.choice, schedule_for_config(plan.choice).placement
        if choice.ranks > 1 and placement.pipelines == 1 and len(finalists) < FINALISTS:
            finalists.setdefault((placement, choice.replicas, choice.rows), plan)
    for plan in finalists.values():
        cut = cuts[id(plan)]
        cut = replace(cut, units=tuple(unit.split for unit in cut.units))  # whatever its own order has
        schedule = search_schedule(schedule_for_config(plan.choice), cut, seconds / len(finalists))
        if schedule is not None:
            improved = build_plan(replace(plan.choice, schedule=schedule.name), schedule, cut)
            if not improved.lacking_bytes and improved.step_seconds < plan.step_seconds:
                yield replace(improved, order=str(schedule))


def _reject(plan: Plan) -> RejectedConfig:
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
    source = plan.choice if isinstance(plan.schedule, str) else plan.schedule
    extras = len(plan.recompute) + len(plan.offload)
    numbers = source.placement.pipelines, bool(plan.order), plan.choice.chunks, source.splits, extras, plan.choice.ranks
    return (*numbers, plan.step_seconds, max(plan.memory_bytes))


MAX_ACTIONS = 6000
"""Schedules with more actions are not searched: they take minutes, and gain less."""


def search_schedule(schedule: Schedule, cut: Cut, seconds: float) -> Schedule | None:
    """Search for the best order of the same stages on the same ranks that keeps all activations within memory; None if
    a named schedule is as good.

    Args:
        schedule: whose placement and microbatches are kept.
    """
    placement = schedule.placement
    if 3 * placement.stages * schedule.microbatches > MAX_ACTIONS:
        return None
    budgets, (batch_bytes, _, transient) = [], transient_memory(schedule, cut)
    for rank, limit in enumerate(cut.limits):
        stages = [stage % placement.depth for stage in placement.stages_on(rank)]
        static_bytes = sum(cut.costs[stage].held_bytes for stage in stages)
        memories = (transient[stage] for stage in stages)  # in any order, with all gradients there
        workspace = max(max(memory.working, memory.first_inputs - memory.early_bytes) for memory in memories)
        budgets.append(limit - batch_bytes[rank] - static_bytes - workspace)
    try:
        result = search(
            placement,
            schedule.microbatches,
            cut.costs,
            arrange_devices(schedule, cut)[1],
            memory_limit=None if min(budgets) == math.inf else budgets,
            objective="makespan",
            seconds=seconds,
        )
    except ArgumentError:  # a rank has no room for even one microbatch
        return None
    return result.schedule if result.schedule.name == "search" else None

"""The search for the best plans: every open choice, the most promising first, until a bound says that none wins."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.balance import UnitCost
from penstock.plan.choice import Choice, choices
from penstock.plan.cluster import Cluster
from penstock.plan.layout import kinds_of_ranks
from penstock.plan.plan import MadeFor, Plan
from penstock.plan.predict import Cut, cut, least_seconds, order_of, predict
from penstock.plan.sizes import Sizes

BEST = 5
"""How many plans to list."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A choice that is not among the best.

    Attributes:
        choice: what was not chosen.
        step_seconds: what a step takes; if it was not simulated, a lower bound.
        bubble: the share of time lost; None if it was not simulated.
        lacking_bytes: what the fullest rank needs beyond its memory.
        recomputed: how many stages are recomputed.
        reduce_seconds: what the sums of replicas' gradients take of the step.
    """

    choice: Choice
    step_seconds: float
    bubble: float | None = None
    lacking_bytes: float = 0.0
    recomputed: int = 0
    reduce_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """What was found.

    Attributes:
        best: the plans that fit, the fastest first.
        lost: the other choices, the fastest first.
        nearest: if nothing fits, the plan that lacks least.
    """

    best: tuple[Plan, ...]
    lost: tuple[Lost, ...]
    nearest: Plan | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A choice with its cuts, and a time below which its step cannot be."""

    choice: Choice
    units: tuple[UnitCost, ...]
    where: Cut
    at_least: float


def make_plans(
    sizes: Sizes, cluster: Cluster, global_batch: int, schedules: Sequence[str] | None = None, best: int = BEST
) -> Planned:
    """The fastest ways to train a batch of that many rows on all devices, within their memory.

    Choices are simulated in the order of a lower bound of their time, until that is above the time of the last of the
    best. So no choice is better than those found, by this prediction.

    Args:
        sizes: what the model's units cost.
        cluster: the devices.
        global_batch: the rows of one step, over all replicas.
        schedules: names to choose from; None: all.
        best: how many plans to find.

    Raises:
        ArgumentError: the batch cannot be divided, or no schedule works for these numbers.
    """
    found: list[Plan] = []
    lost: list[Lost] = []
    nearest: Plan | None = None
    made_for = MadeFor.of(next(iter(sizes.profiles.values())))
    candidates = sorted(_candidates(sizes, cluster, global_batch, schedules), key=lambda one: one.at_least)
    for number, candidate in enumerate(candidates):
        if len(found) == best and candidate.at_least >= found[-1].step_seconds:
            lost += [Lost(one.choice, one.at_least) for one in candidates[number:]]
            break
        plan = replace(predict(candidate.choice, candidate.units, cluster, candidate.where), made_for=made_for)
        if plan.lacking_bytes:
            nearest = min((nearest or plan, plan), key=lambda one: one.lacking_bytes)
            lost.append(_as_lost(plan))
            continue
        found = sorted([*found, plan], key=_order)
        lost += [_as_lost(each) for each in found[best:]]
        found = found[:best]
    return Planned(tuple(found), tuple(sorted(lost, key=lambda one: one.step_seconds)), None if found else nearest)


def _candidates(
    sizes: Sizes, cluster: Cluster, global_batch: int, schedules: Sequence[str] | None
) -> Iterator[_Candidate]:
    cuts: dict[Hashable, Cut] = {}
    for choice in choices(sizes, cluster, global_batch, schedules):
        units, schedule = sizes.at(choice.rows), order_of(choice)
        placement = schedule.placement
        for kinds in kinds_of_ranks(cluster, choice.replicas, choice.ranks):
            key = (choice.rows, placement if len(cluster.kinds) > 1 else choice.stages, kinds.shape, kinds.tobytes())
            where = cuts.get(key) or cuts.setdefault(key, cut(units, placement, cluster, kinds))
            costs = list(where.costs) * placement.pipelines
            yield _Candidate(choice, units, where, least_seconds(schedule, costs))


def _as_lost(plan: Plan) -> Lost:
    return Lost(
        plan.choice, plan.step_seconds, plan.bubble, plan.lacking_bytes, len(plan.recompute), plan.reduce_seconds
    )


def _order(plan: Plan) -> tuple[float, int, float]:
    """The fastest first; of equal ones, fewer chunks and less memory."""
    return (plan.step_seconds, plan.choice.chunks, max(plan.memory_bytes))

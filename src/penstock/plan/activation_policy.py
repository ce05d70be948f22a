"""What each stage does with its activations between forward and backward: keeps, recomputes or offloads them; and how
much memory each rank then needs, with the batch, gradients and the running computation.

That depends on the order of a rank's actions, not on their times, and on no other rank's policies, unless the two hold
copies of one stage. So each rank's policies are those that fit with the least extra work, found by trying all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain, product
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

from penstock.costs import UnitCost, kept_bytes, tied_bytes_overcount
from penstock.schedule import Action, Op, Placement, Row, Schedule
from penstock.schedule.activations import offload_trips, recomputed_microbatches
from penstock.simulate import StageCost
from penstock.simulate.computations import IS_COMPUTE, column
from penstock.simulate.costs import LinkCost, StageCosts
from penstock.simulate.memory_use import activations_by_action

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Transient:
    """The transient memory of a stage or a rank, in bytes.

    The first backward of a step makes the gradients of parameters, since an optimizer's `zero_grad` drops them. Each is
    made while what was kept for it goes.

    Attributes:
        working: what a forward or a backward takes while it runs, at most, gradients of parameters apart.
        batch: the model's inputs and the loss's target: of a stage, for one microbatch; of a rank, for the whole step,
            since all are there from its beginning.
        first_backward: what a stage's first backward takes, these gradients included, if it is not split.
        first_inputs, first_weights: the same of the first I, and of the first W.
        early_bytes: of the gradients that I makes already: of parameters whose gradient cannot wait.
    """

    working: float
    batch: float
    first_backward: float = 0.0
    first_inputs: float = 0.0
    first_weights: float = 0.0
    early_bytes: float = 0.0

    @classmethod
    def from_units(cls, units: Sequence[UnitCost], *, splits: bool = False) -> Transient:
        """Sum up consecutive units as one stage: while one runs, the later ones keep nothing of this microbatch, except
        what W needs if backwards are split."""
        cumulative = kept_bytes(units)
        waiting = [unit.waiting_bytes if splits else 0.0 for unit in units]
        gradients = [unit.gradient_bytes for unit in units]
        early = [0 if unit.weight_gradient_bytes else size for unit, size in zip(units, gradients, strict=True)]
        peaks = [
            before + unit.working_bytes + later - cumulative[-1]
            for before, unit, later in zip(cumulative, units, _suffix_sums(waiting)[1:], strict=True)
        ]
        working = max(0.0, *peaks)
        backward, inputs = (max(0.0, *map(add, peaks, _suffix_sums(produced))) for produced in (gradients, early))
        # W goes from the first unit to the last, and frees what waits as it goes
        produced, freed = accumulate(map(sub, gradients, early)), accumulate(waiting, initial=0.0)
        weights = working + max(0.0, *map(sub, produced, freed))
        batch = sum(unit.input_bytes + unit.target_bytes for unit in units)
        return cls(working, batch, backward, inputs, weights, sum(early))


def _suffix_sums(sizes: Sequence[float]) -> list[float]:
    """Return the sum from each element on, and 0 at the end."""
    return [*accumulate(reversed(sizes), initial=0.0)][::-1]


def transient_by_rank(placement: Placement, microbatches: int, memory: Sequence[Transient]) -> list[Transient]:
    """Return the transient memory of each rank, which runs one computation at a time. `memory`: per stage of a copy."""
    depth, by_rank = placement.depth, []
    for stages in placement.by_rank:
        batch = sum(memory[s % depth].batch * len(placement.microbatches_of(s, microbatches)) for s in stages)
        by_rank.append(Transient(max(memory[s % depth].working for s in stages), batch))
    return by_rank


def tied_overcounts(placement: Placement, pieces: Sequence[Sequence[UnitCost]]) -> list[float]:
    """Return the bytes that the stages of each rank count more than once together, since tied parameters are there
    once. `pieces`: the units of each stage of one copy."""
    depth, overcounts = placement.depth, []
    for stages in placement.by_rank:
        numbers = dict.fromkeys(s // depth for s in stages)
        copies = [[pieces[s % depth] for s in stages if s // depth == number] for number in numbers]
        joint = sum(sum(tied_bytes_overcount(chain(*copy))) for copy in copies)
        overcounts.append(joint - sum(sum(tied_bytes_overcount(piece)) for copy in copies for piece in copy))
    return overcounts


def peaks_if_all_kept(schedule: Schedule, costs: Sequence[StageCost], transient: Sequence[Transient]) -> list[float]:
    """Return the memory of each rank if every stage keeps its activations, without the batch. `costs`, `transient`: of
    each stage of one copy."""
    peaks, held = [], activations_by_action(schedule, costs)
    for row, stages, (activations, _) in zip(schedule.rows, schedule.placement.by_rank, held, strict=True):
        rank_costs = [costs[stage % len(costs)] for stage in stages]
        static_bytes = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in rank_costs)
        usage = activations[IS_COMPUTE[column(row.op)]] + transient_bytes(row, costs, transient)
        peaks.append(static_bytes + float(usage.max(initial=0.0)))
    return peaks


def transient_bytes(row: Row, costs: Sequence[StageCost], transient: Sequence[Transient]) -> Floats:
    """Return the gradients of a rank's parameters, from each stage's first backward on, and the transient memory of the
    running computation. An optimizer drops gradients before each step: `zero_grad` does by default."""
    op = column(row.op)
    computes = IS_COMPUTE[op]
    op, stage = op[computes], column(row.stage)[computes]
    workspace = np.array([entry.working for entry in transient])[stage % len(costs)]
    gradients = np.zeros(len(op))
    for number in np.unique(stage).tolist():
        backward = np.flatnonzero((stage == number) & (op != Op.F.code))
        if not len(backward):
            continue
        memory, size = transient[number % len(costs)], costs[number % len(costs)].gradient_bytes
        weights = backward[op[backward] == Op.W.code]
        if op[backward[0]] == Op.B.code or not len(weights):
            workspace[backward[0]] = memory.first_backward
            gradients[backward[0] + 1 :] += size
        else:
            workspace[backward[0]], workspace[weights[0]] = memory.first_inputs, memory.first_weights
            gradients[backward[0] + 1 :] += memory.early_bytes
            gradients[weights[0] + 1 :] += size - memory.early_bytes
    return np.asarray(workspace + gradients)


MAX_COMBINATIONS = 4096
"""Of the policies of a rank's stages; with more, all stages have the same policy."""


class Policy(Enum):
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
        offload_link: to the host's memory and back; None: nothing is offloaded.
        limits: what each rank has.
        recompute_seconds: what each takes to run its forward again, if it is recomputed.
        transient: what each takes while it runs.
    """

    costs: Sequence[StageCost]
    input_bytes: Sequence[float]
    offload_link: LinkCost | None
    limits: Sequence[float]
    recompute_seconds: Sequence[float]
    transient: Sequence[Transient]


@dataclass(frozen=True)
class PolicyChoice:
    """The policies of a schedule's stages.

    Attributes:
        policies: of each stage of one copy.
        peak_bytes: what each rank needs at most, in total.
        costs: of each stage, copies included.
    """

    policies: tuple[Policy, ...]
    peak_bytes: tuple[float, ...]
    costs: tuple[StageCosts, ...]


def choose_policies(schedule: Schedule, demand: Demand) -> PolicyChoice:
    """Choose for each rank the policy that fits with the least extra work; if none fits, the one with the smallest
    shortfall."""
    placement = schedule.placement
    policies = dict.fromkeys(range(placement.depth), Policy.KEEPS)
    peaks = dict(enumerate(peaks_if_all_kept(schedule, demand.costs, demand.transient)))
    costs: dict[int, StageCosts] = dict(enumerate([*demand.costs] * placement.pipelines))
    for ranks in _group_ranks(schedule):
        if any(peaks[rank] > demand.limits[rank] for rank in ranks):
            by_stage, new_peaks, new_costs = _choose_for_ranks(schedule, demand, ranks)
            policies |= by_stage
            peaks |= new_peaks
            for stage, cost in new_costs.items():
                # One for each microbatch of the schedule: a copy of the model has only some.
                series = () if isinstance(cost, StageCost) else tuple(cost)
                costs[stage] = (*series, *(series[-1:] * (schedule.microbatches - len(series)))) if series else cost
    return PolicyChoice(tuple(policies.values()), tuple(peaks.values()), tuple(costs.values()))


def _choose_for_ranks(
    schedule: Schedule, demand: Demand, ranks: Sequence[int]
) -> tuple[dict[int, Policy], dict[int, float], dict[int, StageCosts]]:
    """Choose for ranks that hold copies of the same stages, usually a single rank: return the policy of each stage of
    one copy, what each rank then needs, and what each stage costs."""
    depth = schedule.placement.depth
    on_rank = {rank: schedule.placement.stages_on(rank) for rank in ranks}
    model_stages = sorted({stage % depth for stages in on_rank.values() for stage in stages})
    policies = [policy for policy in Policy if demand.offload_link is not None or policy is not Policy.OFFLOADS]
    outcomes: dict[tuple[int, Policy], _StageOutcome] = {}
    fixed: dict[int, tuple[float, Floats]] = {}
    for rank, stages in on_rank.items():
        costs = [demand.costs[stage % depth] for stage in stages]
        transient = transient_bytes(schedule.rows[rank], demand.costs, demand.transient)
        fixed[rank] = sum(cost.parameter_bytes + cost.optimizer_bytes for cost in costs), transient
        work = tuple(action for action in schedule.rows[rank] if action.op.is_compute)
        for stage, policy in product(stages, policies):
            outcomes[stage, policy] = _StageOutcome.simulate(policy, work, stage, demand)
    options = []
    too_many = len(policies) ** len(model_stages) > MAX_COMBINATIONS
    combinations = product(policies, repeat=len(model_stages))  # keeping everything first
    for chosen in [(policy,) * len(model_stages) for policy in policies] if too_many else combinations:
        by_stage = dict(zip(model_stages, chosen, strict=True))
        by_rank = {rank: [outcomes[s, by_stage[s % depth]] for s in stages] for rank, stages in on_rank.items()}
        peaks = {}
        for rank, (static_bytes, transient) in fixed.items():
            usage = np.sum([outcome.bytes_held for outcome in by_rank[rank]], axis=0) + transient
            peaks[rank] = static_bytes + float(usage.max(initial=0.0))
        missing = shortfall([*peaks.values()], [demand.limits[rank] for rank in ranks])
        extra = sum(outcome.extra_seconds for rank_outcomes in by_rank.values() for outcome in rank_outcomes)
        options.append(((missing, extra, sum(policy is not Policy.KEEPS for policy in chosen)), by_stage, peaks))
    _, by_stage, peaks = min(options, key=lambda option: option[0])
    stage_costs = {s: outcomes[s, by_stage[s % depth]].cost for stages in on_rank.values() for s in stages}
    return by_stage, peaks, stage_costs


@dataclass(frozen=True, slots=True)
class _StageOutcome:
    """A stage of a rank under one policy.

    Attributes:
        bytes_held: the bytes that are there during each of the rank's actions.
        cost: what it costs; one for each microbatch (copies count on) if they may differ.
        extra_seconds: what the policy adds to the rank's work.
    """

    bytes_held: Floats
    cost: StageCosts
    extra_seconds: float

    @classmethod
    def simulate(cls, policy: Policy, work: Sequence[Action], stage: int, demand: Demand) -> _StageOutcome:
        depth = len(demand.costs)
        cost, received = demand.costs[stage % depth], demand.input_bytes[stage % depth]
        recompute = demand.recompute_seconds[stage % depth]
        copy_seconds = 0.0 if demand.offload_link is None else demand.offload_link.seconds(cost.activation_bytes)
        positions = _positions(work, stage)
        affected = frozenset[int]()  # the microbatches that are recomputed, or offloaded for long enough
        if policy is not Policy.KEEPS:
            recomputes = policy is Policy.RECOMPUTES
            affected = (
                recomputed_microbatches(lambda _: (), work, stage)
                if recomputes
                else offload_trips(work, stage).for_backward
            )
        costs, deltas = [cost] * (max(positions, default=-1) + 1), np.zeros(len(work) + 2)

        def hold(first: int, last: int, amount: float) -> None:
            deltas[first] += amount
            deltas[last + 1] -= amount

        def stall(index: int) -> float:
            """Return by how much a copy takes longer than the computation beside which it travels."""
            concurrent = work[index]
            return max(0.0, copy_seconds - demand.costs[concurrent.stage % depth].seconds(concurrent.op))

        for microbatch, (forward, backward, end) in positions.items():
            if microbatch not in affected:
                hold(forward, backward, cost.activation_bytes)
            elif policy is Policy.RECOMPUTES:
                hold(forward, end, received)
                hold(forward, forward, cost.activation_bytes)
                hold(backward, backward, cost.activation_bytes)
                costs[microbatch] = replace(cost, backward_input_seconds=cost.backward_input_seconds + recompute)
            else:
                hold(forward, forward + 1, cost.activation_bytes)
                hold(backward - 1, backward, cost.activation_bytes)
                stalled, fetch_stall = cost.forward_seconds + stall(forward + 1), stall(backward - 1)
                costs[microbatch] = replace(
                    cost, forward_seconds=stalled, backward_input_seconds=cost.backward_input_seconds + fetch_stall
                )
            if end > backward:
                hold(backward + 1, end, cost.weight_gradient_bytes)
        changed = (costs[microbatch] for microbatch in positions) if affected else ()
        extra = sum(
            new.forward_seconds - cost.forward_seconds + new.backward_seconds - cost.backward_seconds for new in changed
        )
        return cls(np.cumsum(deltas)[: len(work)], cost if policy is Policy.KEEPS else costs, extra)


def _positions(work: Sequence[Action], stage: int) -> dict[int, tuple[int, int, int]]:
    """Return where in a rank's row each microbatch of a stage has its forward, its backward (B or I) and its end (B or
    W); without a backward, the forward ends it."""
    positions: dict[int, list[int]] = {}
    for index, action in enumerate(work):
        if action.stage == stage and action.microbatch is not None:
            positions.setdefault(action.microbatch, []).append(index)
    return {k: (indices[0], indices[min(1, len(indices) - 1)], indices[-1]) for k, indices in positions.items()}


def _group_ranks(schedule: Schedule) -> list[list[int]]:
    """Group the ranks so that no two groups share a stage, not even copies of one."""
    placement = schedule.placement
    groups: list[tuple[set[int], set[int]]] = []
    for rank, stages in enumerate(placement.by_rank):
        model_stages = {stage % placement.depth for stage in stages}
        overlapping = [group for group in groups if group[1] & model_stages]
        groups = [group for group in groups if not group[1] & model_stages]
        groups.append(({rank}.union(*(g[0] for g in overlapping)), model_stages.union(*(g[1] for g in overlapping))))
    return [sorted(ranks) for ranks, _ in groups]


def shortfall(peak_bytes: Sequence[float], limits: Sequence[float]) -> float:
    """Return the largest shortfall of a rank; 0 if all fit."""
    return max((max(0.0, peak - limit) for peak, limit in zip(peak_bytes, limits, strict=True)), default=math.inf)

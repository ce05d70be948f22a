"""What ranks keep, recompute and offload: never more work than needed; sums of gradients begin as stages end."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan import Cluster
from penstock.plan.activation_policy import Demand, Policy, Transient, choose_policies
from penstock.plan.predict import reduce_end
from penstock.schedule import Op, Schedule, generate, reduce_replicas
from penstock.simulate import LinkCost, StageCost, simulate

COST = StageCost(1, 1, 1, activation_bytes=10, weight_gradient_bytes=10, parameter_bytes=5)


def _demand(costs: list[StageCost], limits: list[float], host: LinkCost | None = None) -> Demand:
    """Nothing is taken besides; a forward that runs again takes as long as the first time."""
    received, again = [1.0] * len(costs), [one.forward_seconds for one in costs]
    return Demand(costs, received, host, limits, again, [Transient(0.0, 0.0)] * len(costs))


def _by_hand(schedule: Schedule, costs: list[StageCost], ways: tuple[Policy, ...], rank: int) -> float:
    """A rank's peak, by walking through its row."""
    depth, now, peak = schedule.placement.depth, 0.0, 0.0
    work = [action for action in schedule.rows[rank] if action.op.is_compute]
    constant = sum(costs[stage % depth].parameter_bytes for stage in schedule.placement.stages_on(rank))
    for place, action in enumerate(work):
        size, again = 10.0, ways[action.stage % depth] is Policy.RECOMPUTES
        at_once = [(a.stage, a.microbatch) for a in work[place - 1 : place + 2]].count(
            (action.stage, action.microbatch)
        ) > 1 and action.op in (Op.F, Op.B)
        kept = 1.0 if again and not at_once else size
        if action.op is Op.F:
            now += kept
        working = size if again and not at_once else 0.0
        peak = max(peak, now + working)
        if action.op is Op.B:
            now -= kept
    return constant + peak


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "chimera"])
@settings(max_examples=15, deadline=None)
@given(limit=st.integers(20, 120))
def test_no_way_that_fits_recomputes_less(name: str, limit: int) -> None:
    schedule = generate(name, 4, 8)
    depth = schedule.placement.depth
    costs = [replace(COST, forward_seconds=1 + 0.1 * stage) for stage in range(depth)]
    found = choose_policies(schedule, _demand(costs, [float(limit)] * 4))
    for rank in range(4):
        assert found.peak_bytes[rank] == pytest.approx(_by_hand(schedule, costs, found.policies, rank))
    if depth > 4 or not all(peak <= limit for peak in found.peak_bytes):
        return
    work = sum(
        sum(_forwards(one)[k] for k in schedule.placement.microbatches_of(stage, 8))
        for stage, one in enumerate(found.costs)
    )
    for ways in product([Policy.KEEPS, Policy.RECOMPUTES], repeat=depth):
        if all(_by_hand(schedule, costs, ways, rank) <= limit for rank in range(4)):
            again = sum(
                costs[s].forward_seconds * _again(schedule, s) for s in range(depth) if ways[s] is Policy.RECOMPUTES
            )
            assert work <= again + 1e-9


def _forwards(cost: object) -> list[float]:
    each = [cost] * 8 if isinstance(cost, StageCost) else list(cost)  # type: ignore[call-overload]
    return [one.backward_input_seconds - COST.backward_input_seconds for one in each]


def _again(schedule: Schedule, stage: int) -> int:
    """How many of a stage's forwards its backward does not follow at once, in all copies."""
    count, depth = 0, schedule.placement.depth
    for row in schedule.rows:
        work = [(a.op, a.stage, a.microbatch) for a in row]
        count += sum(
            op is Op.F and s % depth == stage and work[place + 1] != (Op.B, s, k)
            for place, (op, s, k) in enumerate(work)
        )
    return count


def test_a_forward_that_its_backward_follows_is_not_run_again() -> None:
    """As in the runtime: the last stage of 1F1B gains nothing, and pays nothing."""
    schedule = generate("1f1b", 2, 4)
    found = choose_policies(schedule, _demand([COST] * 2, [1.0, 1.0]))
    assert found.policies == (Policy.RECOMPUTES, Policy.KEEPS)
    first = found.costs[0]
    assert not isinstance(first, StageCost)
    assert [each.backward_input_seconds for each in first] == [2, 2, 2, 2]


def test_a_fast_host_link_is_taken_rather_than_recomputing() -> None:
    schedule = generate("gpipe", 2, 8)
    demand = _demand([COST] * 2, [50.0, 50.0], LinkCost(0.0, 100.0))
    found = choose_policies(schedule, demand)
    assert found.policies == (Policy.OFFLOADS, Policy.OFFLOADS)
    assert max(found.peak_bytes) <= 50
    assert all(each == COST for cost in found.costs for each in ([cost] if isinstance(cost, StageCost) else cost))
    slow = choose_policies(schedule, replace(demand, offload_link=LinkCost(0.0, 1.0)))
    assert slow.policies == (Policy.RECOMPUTES, Policy.RECOMPUTES)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "gpipe"])
def test_sums_begin_where_the_runtime_begins_them(name: str) -> None:
    """The rows of the runtime, walked by hand: a sum starts where its `REDUCE_GRAD` stands, one after another."""
    schedule = generate(name, 2, 4)
    depth, cluster = schedule.placement.depth, Cluster(4, link=LinkCost(0.5, 10.0))
    cost = StageCost(1, 1, 1, gradient_bytes=10)
    timeline = simulate(schedule, cost)
    ends = []
    for rank, row in enumerate(reduce_replicas(schedule, {*range(depth)}).rows):
        spans, free, now = iter(timeline.spans(rank)), 0.0, 0.0
        for action in row:
            if action.op is Op.REDUCE_GRAD:
                free = max(free, now) + cluster.ring_seconds(10, 2, crosses=False)
            else:
                now = next(spans).end_seconds
        ends.append(max(free, now))
    found = reduce_end(schedule, timeline, [10.0] * depth, cluster, [False] * 2, 2)
    assert math.isclose(found, max(ends))
    everything_after = timeline.makespan_seconds + depth / 2 * cluster.ring_seconds(10, 2, crosses=False)
    assert found < everything_after if depth > 2 else math.isclose(found, everything_after)

"""The simulation a second time, as plainly as can be: a clock that ticks, ranks that work, links that carry messages.

Whole numbers of ticks only, and nothing takes less than one. What waits for what is written by hand, once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.schedule import Action, Op, Overlap, Schedule
from penstock.simulate.costs import LinkCost, StageCost
from scaffolding.some_schedules import needs_by_hand

Times = dict[Action, tuple[int, int]]


def seconds(action: Action, cost: StageCost) -> float:
    return {
        Op.F: cost.forward_seconds,
        Op.B: cost.backward_input_seconds + cost.backward_weight_seconds,
        Op.I: cost.backward_input_seconds,
        Op.W: cost.backward_weight_seconds,
    }[action.op]


Costs = Sequence[Sequence[StageCost]]
"""Of each stage, one for each microbatch."""


def item_seconds(item: Action | Overlap, costs: Costs) -> float:
    together = costs[item.parts[0].stage][item.parts[0].microbatch or 0].overlapped_seconds
    if isinstance(item, Overlap) and together is not None:
        return together
    return sum(seconds(part, costs[part.stage][part.microbatch or 0]) for part in item.parts)


def tick(schedule: Schedule, costs: Costs, links: dict[tuple[int, int], LinkCost]) -> Times | None:
    """When each action's item starts and ends, two that overlap together; None if the ranks come to a stop."""
    rank_of = schedule.placement.rank_of
    todo = [list(row.items()) for row in schedule.rows]
    needs = needs_by_hand(schedule)
    readers = defaultdict(set)
    for action, wanted in needs.items():
        for need in wanted:
            readers[need].add(rank_of[action.stage])
    there: dict[tuple[Action, int], float] = {}  # when the output of an action is on a rank
    working: list[tuple[Action | Overlap, float] | None] = [None] * schedule.ranks
    queues: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    times: Times = {}
    now = 0
    while any(todo) or any(working):
        for rank, work in enumerate(working):
            if work is not None and work[1] == now:
                working[rank] = None
                for part in work[0].parts:
                    there[part, rank] = now
                    for reader in readers[part] - {rank}:
                        queues[rank, reader].append(part)
        for pair, queue in queues.items():
            while queue:
                message = queue.pop(0)
                target = next(a for a in needs if message in needs[a] and rank_of[a.stage] == pair[1])
                size = costs[min(message.stage, target.stage)][message.microbatch or 0].output_bytes
                wire = size / links[pair].bytes_per_second
                there[message, pair[1]] = now + wire + links[pair].latency_seconds
        for rank, items in enumerate(todo):
            if working[rank] is None and items:
                wanted = set().union(*(needs[part] for part in items[0].parts)) - set(items[0].parts[:1])
                if all(there.get((need, rank), now + 1) <= now for need in wanted):
                    item = items.pop(0)
                    working[rank] = (item, now + item_seconds(item, costs))
                    times |= dict.fromkeys(item.parts, (now, int(now + item_seconds(item, costs))))
        if not any(working) and not any(queues.values()) and not any(moment > now for moment in there.values()):
            return None if any(todo) else times
        now += 1
    return times

"""Schedule and costs -> Timeline, straight from the dependencies: each action starts as soon as it can."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.costs import LinkCost, StageCost
from penstock.errors import ArgumentError
from penstock.schedule.action import Action, Op
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.order import earliest_times
from penstock.schedule.passes import drop_communication
from penstock.schedule.schedule import Schedule
from penstock.timeline import Span, Timeline

NO_COST = LinkCost(0.0)
"""Messages that arrive as they are sent."""


def simulate(schedule: Schedule, costs: StageCost | Sequence[StageCost], link: LinkCost = NO_COST) -> Timeline:
    """The timeline of a schedule in which every action starts as soon as its rank and all that it waits for allow.

    A dependency that crosses ranks costs `link` once; links are not contended. The schedule's own messages, if it has
    any, are left out: what they cost is the link's. Reductions take no time and are left out too.

    Args:
        schedule: with or without messages.
        costs: of every stage, or one for each.
        link: between any two ranks.

    Raises:
        ArgumentError: not one cost for each stage.
        ScheduleError: the schedule cannot be run.
    """
    by_stage = [costs] * schedule.stages if isinstance(costs, StageCost) else list(costs)
    if len(by_stage) != schedule.stages:
        raise ArgumentError(f"{len(by_stage)} costs for {schedule.stages} stages; give one, or one for each stage")
    compute = drop_communication(schedule)
    dependencies = Dependencies(compute)
    actions, rank_of = dependencies.actions, dependencies.rank_of
    durations = [_seconds(action, by_stage) for action in actions]

    def delay(made: int, used: int) -> float:
        if rank_of[made] == rank_of[used]:
            return 0.0
        # The same bytes cross a cut in both directions: the lower stage's output, or its gradient.
        return link.seconds(by_stage[min(actions[made].stage, actions[used].stage)].output_bytes)

    starts, ends = earliest_times(dependencies, durations.__getitem__, delay)
    rows = []
    for rank, first in enumerate(dependencies.first[:-1]):
        spans, free = [], 0.0
        for node in range(first, dependencies.first[rank + 1]):
            if actions[node].op.is_compute:
                spans.append(Span(rank, actions[node], starts[node], ends[node], starts[node] - free))
                free = ends[node]
        rows.append(spans)
    return Timeline.merge(rows)


def _seconds(action: Action, costs: Sequence[StageCost]) -> float:
    match action.op:
        case Op.F:
            return costs[action.stage].forward_seconds
        case Op.B:
            return costs[action.stage].backward_seconds
        case Op.I:
            return costs[action.stage].backward_input_seconds
        case Op.W:
            return costs[action.stage].backward_weight_seconds
        case _:
            return 0.0

"""What follows from dependencies: a global order of actions, the deadlock that prevents one, and earliest times."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock._base.errors import ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Advance:
    """How far the ranks get.

    Attributes:
        order: the nodes that ran, in one order that respects rows and dependencies.
        blocked: for each rank that got stuck, the node that it is stuck at and the one that it waits for.
    """

    order: list[int]
    blocked: dict[int, tuple[int, int]]


def advance(dependencies: Dependencies, rendezvous: bool = False) -> Advance:
    """Run the ranks in turn, one action each, until all have finished or none can go on.

    With `rendezvous` a send also waits until its receive has been posted; without, sends are buffered. What can run
    never depends on the order of turns, so a deadlock found here is the schedule's own.
    """
    position, end = dependencies.first[:-1], dependencies.first[1:]
    done = bytearray(len(dependencies.actions))
    order: list[int] = []
    blocked: dict[int, tuple[int, int]] = {}
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    runnable = deque(range(len(position)))
    while runnable:
        rank = runnable.popleft()
        if (node := position[rank]) == end[rank]:
            continue
        needed = dependencies.before(node)
        if rendezvous and (receive := dependencies.rendezvous(node)) is not None:
            needed.append(receive)
        for need in needed:
            if not done[need]:
                blocked[rank] = (node, need)
                waiting[need].append(rank)
                break
        else:
            done[node] = True
            order.append(node)
            position[rank] += 1
            runnable.append(rank)
            for waiter in waiting.pop(node, ()):
                del blocked[waiter]
                runnable.append(waiter)
    return Advance(order, blocked)


def describe_cycle(dependencies: Dependencies, blocked: dict[int, tuple[int, int]]) -> tuple[int, str]:
    """Return the first rank in a deadlock's cycle, and its text: rank a waits at X for Y of rank b, which waits at
    ..."""
    chain = [min(blocked)]
    while (target := dependencies.rank_of[blocked[chain[-1]][1]]) not in chain:
        chain.append(target)
    cycle = chain[chain.index(target) :]
    steps = [
        f"waits at {dependencies.actions[node]} for {dependencies.actions[need]} of rank {dependencies.rank_of[need]}"
        for node, need in (blocked[rank] for rank in cycle)
    ]
    return cycle[0], f"rank {cycle[0]} " + ", which ".join(steps)


def linearize(schedule: Schedule) -> list[tuple[int, Action]]:
    """Return one global order of (rank, action) in which a single process could run the whole schedule.

    Respects rows and dependencies, with buffered sends; the same schedule always gives the same order.

    Raises:
        ScheduleError: an action waits for one that no rank has, or for one that waits for it; the message names both.
    """
    dependencies = Dependencies(schedule)
    order = runnable_order(dependencies)
    return [(dependencies.rank_of[node], dependencies.actions[node]) for node in order]


def runnable_order(dependencies: Dependencies) -> list[int]:
    """Return the order of `linearize` as nodes. Raise ScheduleError as it does."""
    first = min(dependencies.missing(), key=lambda pair: pair[0], default=None)
    if first is not None:
        node, need = first
        rank, action = dependencies.rank_of[node], dependencies.actions[node]
        raise ScheduleError(f"rank {rank} waits at {action} for {need}, which no rank has; add it to the schedule")
    result = advance(dependencies)
    if result.blocked:
        raise ScheduleError(f"deadlock: {describe_cycle(dependencies, result.blocked)[1]}")
    return result.order


def earliest_times(
    dependencies: Dependencies, duration: Callable[[int], float], delay: Callable[[int, int], float]
) -> tuple[list[float], list[float]]:
    """Compute when each node starts and ends if each one starts as soon as it can.

    Args:
        dependencies: of a schedule that can be run.
        duration: of a node.
        delay: from the end of a node to the earliest start of one that waits for it.

    Returns:
        (starts, ends), by node, counted from 0 in whatever unit `duration` and `delay` have.

    Raises:
        ScheduleError: the schedule cannot be run, as `linearize` says.
    """
    starts, ends = [0.0] * len(dependencies.actions), [0.0] * len(dependencies.actions)
    free = [0.0] * (len(dependencies.first) - 1)
    for node in runnable_order(dependencies):
        rank = dependencies.rank_of[node]
        arrivals = (ends[need] + delay(need, node) for need in dependencies.before(node))
        starts[node] = max(free[rank], max(arrivals, default=0.0))
        free[rank] = ends[node] = starts[node] + duration(node)
    return starts, ends

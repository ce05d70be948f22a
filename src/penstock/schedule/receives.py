"""When a receive may be posted: after every action of its own rank that its message depends on.

Such a receive could not be filled before that action has run anyway. Posting it earlier does harm if a posted receive
occupies something: on a GPU it is a kernel that spins, and what is launched behind it on the same hardware queue (the
very action that it waits for) may never start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from penstock.schedule.action import SENDS, Action, Overlap
from penstock.schedule.dependencies import Dependencies
from penstock.schedule.order import advance
from penstock.schedule.schedule import Schedule


def early_receives(dependencies: Dependencies, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield receives that are posted before an action of their rank that their message depends on.

    Args:
        order: all nodes, in an order that respects rows and dependencies.

    Yields:
        Nodes: the receive, and the last action of its rank that the SEND of its message comes after, by rows and
        dependencies.
    """
    ranks, rank_of, ops = len(dependencies.first) - 1, dependencies.rank_of, dependencies.actions.op
    if SENDS.isdisjoint(ops):
        return
    # For each rank, the last of its nodes that came before. The list is replaced, never changed, so nodes can share it.
    latest = [[-1] * ranks for _ in range(ranks)]
    latest_at: list[list[int]] = [[]] * len(dependencies.actions)
    for node in order:
        rank = rank_of[node]
        for need in dependencies.before(node):
            need_rank = rank_of[need]
            if latest[rank][need_rank] < need and need_rank != rank:
                latest[rank] = list(map(max, latest[rank], latest_at[need]))
                latest[rank][need_rank] = need
        latest_at[node] = latest[rank]
        if ops[node] in SENDS and (receive := dependencies.other_end(node)) is not None:
            last = latest[rank][rank_of[receive]]
            if last > receive:
                yield receive, last


def postpone_receives(schedule: Schedule) -> Schedule:
    """Move each receive behind all actions of its rank that its message depends on.

    Keeps the order of messages, and a schedule that finishes still does: such an action already comes before the SEND,
    so the SEND waits for nothing new.

    Args:
        schedule: with messages, and runnable.
    """
    dependencies = Dependencies(schedule)
    targets = dict(early_receives(dependencies, advance(dependencies).order))
    if not targets:
        return schedule
    return schedule.with_rows([_move(schedule, dependencies, rank, targets) for rank in range(schedule.ranks)])


def _move(schedule: Schedule, dependencies: Dependencies, rank: int, moved: dict[int, int]) -> list[Action | Overlap]:
    """Return a rank's items, with each receive in `moved` placed after the node that `moved` names for it."""
    items: list[Action | Overlap] = []
    after: defaultdict[int, list[Action | Overlap]] = defaultdict(list)
    node = dependencies.first[rank]
    for item in schedule.rows[rank].items():
        nodes = range(node, node + len(item.parts))
        if node in moved:
            after[moved[node]].append(item)
        else:
            items.append(item)
        for current in nodes:
            items += after.pop(current, ())
        node = nodes.stop
    return items

"""Passes over schedules: split or merge backwards, leave some out, reduce gradients.

Two have files of their own: `communication.py` adds messages, `sharding.py` gathers sharded parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace

from penstock._base.errors import ArgumentError
from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.dependencies import stages_with_backward
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def split_backward(schedule: Schedule) -> Schedule:
    """Replace every B by I and W, one right after the other.

    >>> from penstock.schedule import generate
    >>> print(split_backward(generate("gpipe", ranks=1, microbatches=2)))
    gpipe: 2 microbatches, stages on ranks 0
    rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
    """
    return _replace(
        schedule,
        lambda a: (Action(a.stage, Op.I, a.microbatch), Action(a.stage, Op.W, a.microbatch)) if a.op is Op.B else (a,),
    )


def merge_backward(schedule: Schedule) -> Schedule:
    """Replace every I by B, and remove every W."""
    merged = {Op.I: Op.B}
    return _replace(
        schedule,
        lambda a: () if a.op is Op.W else (Action(a.stage, merged.get(a.op, a.op), a.microbatch, a.peer),),
    )


def forward_only(schedule: Schedule) -> Schedule:
    """Keep only the forwards, in the same order and without messages: for evaluation."""
    return _replace(schedule, lambda a: (a,) if a.op is Op.F else ())


def compute_only(schedule: Schedule) -> Schedule:
    """Keep only F, B, I, W and overlaps: drop messages, reductions, and gathers of sharded parameters."""
    return schedule.with_rows([[item for item in row.items() if item.parts[0].op.is_compute] for row in schedule.rows])


def drop_communication(schedule: Schedule) -> Schedule:
    """Drop sends and receives: undo `add_communication`."""
    return _replace(schedule, lambda a: () if a.op.is_communication else (a,))


def drop_backward(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Remove the backwards of `stages` and the messages that carry gradients to or from them.

    For stages that need no backward because they, and everything that enters them, are frozen.
    """

    def keep(action: Action) -> tuple[Action, ...]:
        gradient = action.op.is_backward or action.op in (Op.SEND_B, Op.RECV_B)
        dropped = gradient and (action.stage in stages or action.peer in stages)
        return () if dropped else (action,)

    return _replace(schedule, keep)


def truncate_microbatches(schedule: Schedule, microbatches: int, ends: Set[int] = frozenset()) -> Schedule:
    """Return the schedule for a smaller batch: only its first microbatches, in the same order, renumbered.

    Nothing waits for what is left out, so a legal schedule stays legal, and within its memory. If there are several
    pipelines, each keeps the first of its microbatches.

    Args:
        schedule: without messages.
        microbatches: how many to keep; at most all, at least one for each pipeline.
        ends: microbatches to keep in any case, rather than the last of the first ones.

    Raises:
        ArgumentError: there are fewer microbatches, or too few would be kept.
    """
    placement = schedule.placement
    if not placement.pipelines <= microbatches <= schedule.microbatches:
        raise ArgumentError(
            f"microbatches={microbatches}: schedule {schedule.name!r} has {schedule.microbatches}, of which at least "
            f"{placement.pipelines} must stay"
        )
    numbers: dict[int, int] = {}
    for stage in range(0, placement.stages, placement.depth):
        old, new = (placement.microbatches_of(stage, count) for count in (schedule.microbatches, microbatches))
        free = [number for number in old if number not in ends]
        chosen = [*free[: max(0, len(new) - len(old) + len(free))], *(ends & set(old))]
        if len(chosen) > len(new):
            raise ArgumentError(
                f"microbatches={microbatches}: {len(chosen)} must stay of schedule {schedule.name!r}: {sorted(chosen)}"
            )
        numbers.update(zip(sorted(chosen), new, strict=True))

    def renumber(action: Action) -> tuple[Action, ...]:
        if action.microbatch is None or action.op is Op.REDUCE_GRAD:  # its number is that of a group
            return (action,)
        return (replace(action, microbatch=numbers[action.microbatch]),) if action.microbatch in numbers else ()

    return Schedule(schedule.name, placement, microbatches, _replace(schedule, renumber).rows)


def reduce_ties(schedule: Schedule, groups: Sequence[Sequence[int]]) -> Schedule:
    """Add reductions for the gradients of parameters that several stages hold.

    For each group g, every rank that holds any of its stages gets one `REDUCE_GRAD` with g in the microbatch's place,
    on the lowest of these stages, right after the last B or W of any of them, but never before the reduction of a lower
    group, so that all ranks start reductions in the same order. A rank whose stages of the group have no backward joins
    at the end of its row. Groups that live on one rank, or have no backward at all, get none.

    Args:
        schedule: with or without messages.
        groups: the stages of each group.

    Raises:
        ArgumentError: a group names a stage that the schedule does not have.
    """
    for g, group in enumerate(groups):
        unknown = [stage for stage in group if not 0 <= stage < schedule.stages]
        if unknown:
            raise ArgumentError(f"tie group {g} names stage {unknown[0]}; the stages are 0..{schedule.stages - 1}")
    rank_of, with_backward = schedule.placement.rank_of, stages_with_backward(schedule)
    reduced = {
        g: group
        for g, group in enumerate(groups)
        if len({rank_of[stage] for stage in group}) > 1 and not with_backward.isdisjoint(group)
    }
    rows = []
    for rank, row in enumerate(schedule.rows):
        last = _last_weight_gradients(row)
        stages_by_group = {g: [stage for stage in group if rank_of[stage] == rank] for g, group in reduced.items()}
        reductions = [
            (Action(min(local), Op.REDUCE_GRAD, g), max([last[s] for s in local if s in last] or [len(row)]))
            for g, local in stages_by_group.items()
            if local
        ]
        rows.append(_with_reductions(row, reductions))
    return schedule.with_rows(rows)


def reduce_replicas(schedule: Schedule, stages: Set[int], like: Schedule | None = None) -> Schedule:
    """Add reductions for the gradients of stages that have replicas: a `REDUCE_GRAD` without a number.

    It comes right after the stage's last B or W and its sends, so that it overlaps with the stages that still run. A
    stage without a backward gets none.

    Args:
        like: the schedule whose order to follow: replicas must reduce in the same order, though one may have fewer
            microbatches.
    """

    rows = []
    for row, pattern in zip(schedule.rows, (schedule if like is None else like).rows, strict=True):
        last, pattern_last = _last_weight_gradients(row), _last_weight_gradients(pattern)
        order = sorted(stages & last.keys(), key=pattern_last.__getitem__)
        reductions = [(Action(stage, Op.REDUCE_GRAD), last[stage]) for stage in order]
        rows.append(_with_reductions(row, reductions, after_sends=True))
    return schedule.with_rows(rows)


def _last_weight_gradients(row: Row) -> dict[int, int]:
    """Return, for each stage, the index of its last B or W among the row's items."""
    items = enumerate(row.items())
    return {part.stage: index for index, item in items for part in item.parts if part.op in (Op.B, Op.W)}


def _with_reductions(
    row: Row, reductions: Iterable[tuple[Action, int]], *, after_sends: bool = False
) -> list[Action | Overlap]:
    """Insert these reductions into the row in order, each after the item with this index or later."""
    items, inserted, position = [*row.items()], defaultdict[int, list[Action]](list), 0
    for action, earliest in reductions:
        position = min(max(position, earliest), len(items) - 1)
        while after_sends and position + 1 < len(items) and items[position + 1].parts[0].op.is_send:
            position += 1
        inserted[position].append(action)
    return [entry for index, item in enumerate(items) for entry in (item, *inserted[index])]


def _replace(schedule: Schedule, change: Callable[[Action], Iterable[Action]]) -> Schedule:
    """Replace each action by what `change` makes of it. An overlap stays one only if both its parts stay."""

    def rewrite(row: Row) -> Iterator[Action | Overlap]:
        for item in row.items():
            parts = tuple(action for part in item.parts for action in change(part))
            if parts == item.parts:
                yield item
            else:
                yield from parts

    return schedule.with_rows([rewrite(row) for row in schedule.rows])

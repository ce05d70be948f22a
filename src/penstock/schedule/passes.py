"""From a schedule to a schedule: split or merge backwards, leave some out, reduce tied gradients.

`add_communication` has a file of its own, `communication.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.errors import ArgumentError
from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.dependencies import stages_with_backward
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def split_backward(schedule: Schedule) -> Schedule:
    """Every B becomes I and W, one right after the other."""
    return _replace(
        schedule,
        lambda a: (Action(a.stage, Op.I, a.microbatch), Action(a.stage, Op.W, a.microbatch)) if a.op is Op.B else (a,),
    )


def merge_backward(schedule: Schedule) -> Schedule:
    """Every I becomes B, and every W goes."""
    merged = {Op.I: Op.B}
    return _replace(
        schedule,
        lambda a: () if a.op is Op.W else (Action(a.stage, merged.get(a.op, a.op), a.microbatch, a.peer),),
    )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards alone, in the same order and without messages: for evaluation."""
    return _replace(schedule, lambda a: (a,) if a.op is Op.F else ())


def drop_communication(schedule: Schedule) -> Schedule:
    """Everything but sends and receives: undoes `add_communication`."""
    return _replace(schedule, lambda a: () if a.op.is_communication else (a,))


def drop_backward(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Without the backwards of `stages` and the messages that carry gradients to or from them.

    For stages that need no backward because they, and all that enters them, are frozen.
    """

    def keep(action: Action) -> tuple[Action, ...]:
        gradient = action.op.is_backward or action.op in (Op.SEND_B, Op.RECV_B)
        dropped = gradient and (action.stage in stages or action.peer in stages)
        return () if dropped else (action,)

    return _replace(schedule, keep)


def first_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule for a smaller batch: of the first so many microbatches, in the same order, numbered anew.

    Nothing waits for what is left out, so that a legal schedule stays legal, and within its memory. Where there are
    several pipelines, each keeps the first microbatches of its share.

    Args:
        schedule: without messages.
        microbatches: how many are left; at most those that there are, and one for each pipeline.

    Raises:
        ArgumentError: there are not so many, or too few.
    """
    if not schedule.placement.pipelines <= microbatches <= schedule.microbatches:
        raise ArgumentError(
            f"microbatches={microbatches}: schedule {schedule.name!r} has {schedule.microbatches}, of which at least "
            f"{schedule.placement.pipelines} must stay"
        )
    made = Schedule(schedule.name, schedule.placement, microbatches, [()] * schedule.ranks, schedule.slices)
    numbers = [(schedule.numbers_on(stage), made.numbers_on(stage)) for stage in range(schedule.stages)]

    def renumbered(action: Action) -> tuple[Action, ...]:
        if action.microbatch is None or action.op is Op.REDUCE_GRAD:  # whose number is a group's
            return (action,)
        before, after = numbers[action.stage]
        number = action.microbatch - before.start
        return (replace(action, microbatch=after[number]),) if number < len(after) else ()

    return made.with_rows(_replace(schedule, renumbered).rows)


def reduce_ties(schedule: Schedule, groups: Sequence[Sequence[int]]) -> Schedule:
    """Adds the reduction of the gradients of parameters that several stages hold.

    For each group g, every rank that holds any of its stages gets one `REDUCE_GRAD` with g in the microbatch's place,
    on the lowest of these stages: right after the last B or W of any of them, but never before the reduction of a
    lower group, so that all ranks start reductions in the same order. A rank whose stages of the group have no
    backward takes part at the end of its row. Groups that live on one rank, or have no backward at all, get none.

    Args:
        schedule: with or without messages.
        groups: for each group its stages.

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
        here = {g: [stage for stage in group if rank_of[stage] == rank] for g, group in reduced.items()}
        rows.append(_with_reductions(row, {g: stages for g, stages in here.items() if stages}))
    return schedule.with_rows(rows)


def _with_reductions(row: Row, groups: dict[int, list[int]]) -> list[Action | Overlap]:
    """The row with each group's reduction behind the last weight gradient of its stages, in order of the groups."""
    items = list(row.items())
    last = {part.stage: index for index, item in enumerate(items) for part in item.parts if part.op in (Op.B, Op.W)}
    place = 0
    behind: dict[int, list[Action]] = {}
    for g, stages in sorted(groups.items()):
        ends = [last[stage] for stage in stages if stage in last]
        place = max(place, *ends) if ends else len(items) - 1
        behind.setdefault(place, []).append(Action(min(stages), Op.REDUCE_GRAD, g))
    return [entry for index, item in enumerate(items) for entry in (item, *behind.get(index, ()))]


def _replace(schedule: Schedule, change: Callable[[Action], Iterable[Action]]) -> Schedule:
    """Each action replaced by what `change` makes of it. An overlap stays one only if both its parts stay."""

    def changed(row: Row) -> Iterator[Action | Overlap]:
        for item in row.items():
            parts = tuple(action for part in item.parts for action in change(part))
            if parts == item.parts:
                yield item
            else:
                yield from parts

    return schedule.with_rows([changed(row) for row in schedule.rows])

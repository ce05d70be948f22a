"""From the schedule that a user gives to the one that runs: the order of work, then its messages and reductions."""

from __future__ import annotations

from collections.abc import Sequence, Set

from penstock.errors import ArgumentError, ScheduleError
from penstock.schedule import (
    MICROBATCHES,
    Action,
    Op,
    Overlap,
    Schedule,
    add_communication,
    add_sharding,
    check,
    drop_backward,
    drop_communication,
    forward_only,
    generate,
    reduce_replicas,
    reduce_ties,
    stages_with_backward,
    summary,
    whole_last_backward,
)
from penstock.stages import StageMeta, backward_links, forward_links, needs_backward
from penstock.words import counted


def order_of(schedule: str | Schedule, ranks: int, microbatches: int | None, chunks: int | None) -> Schedule:
    """The computations of a schedule, given by name or ready-made, for this many ranks.

    Raises:
        ArgumentError: it does not fit these numbers.
        ScheduleError: it is illegal, or could deadlock.
    """
    if isinstance(schedule, str):
        schedule = generate(schedule, ranks, MICROBATCHES if microbatches is None else microbatches, chunks)
        microbatches = chunks = None
    if schedule.slices > 1:
        raise ArgumentError(
            f"schedule {schedule.name!r} cuts microbatches into {schedule.slices} slices of the sequence, which only a "
            "model that hands its attention's keys and values from slice to slice could run; take one with whole "
            "microbatches"
        )
    if schedule.ranks != ranks:
        raise ArgumentError(
            f"schedule {schedule.name!r} is for {counted(schedule.ranks, 'rank')}, but there are {ranks}"
        )
    if microbatches not in (None, schedule.microbatches):
        raise ArgumentError(
            f"microbatches={microbatches}, but schedule {schedule.name!r} is for {schedule.microbatches}; "
            "leave microbatches out, or make the schedule for as many"
        )
    if chunks is not None and chunks * ranks != schedule.stages:
        raise ArgumentError(
            f"chunks={chunks}, but schedule {schedule.name!r} has {schedule.stages} stages on "
            f"{counted(ranks, 'rank')}; leave chunks out, or make the schedule for as many"
        )
    order = _compute_only(schedule)
    refuse_illegal(order)
    return order


def _compute_only(schedule: Schedule) -> Schedule:
    """The schedule without what is added for a model: messages and the reductions of ties."""
    order = drop_communication(schedule)
    return order.with_rows([[item for item in row.items() if not _reduces(item)] for row in order.rows])


def _reduces(item: Action | Overlap) -> bool:
    return isinstance(item, Action) and item.op is Op.REDUCE_GRAD


def lower_training(
    order: Schedule,
    metas: Sequence[StageMeta],
    ties: Sequence[Sequence[int]],
    sharded: Set[int],
    replicas_like: Schedule | None,
) -> Schedule:
    """The schedule of a training step.

    Args:
        order: computations only.
        metas: of all stages.
        ties: the stages of each group of tied parameters.
        sharded: the stages that `fully_shard` was applied to.
        replicas_like: the schedule in whose order replicas reduce; None: there are no replicas.

    Raises:
        ScheduleError: it is illegal, or has no backward for a stage that must be trained.
    """
    order = whole_last_backward(order, sharded)
    order = drop_backward(order, [meta.index for meta in metas if not needs_backward(meta)])
    order = add_communication(order, forward_links(metas), backward_links(metas))
    order = reduce_ties(order, ties)
    if replicas_like is not None:
        order = reduce_replicas(order, {meta.index for meta in metas if meta.trainable}, replicas_like)
    _refuse_untrained(order, metas)
    order = add_sharding(order, sharded)
    refuse_illegal(order)
    return order


def lower_evaluation(order: Schedule, metas: Sequence[StageMeta], sharded: Set[int]) -> Schedule:
    """The schedule of an evaluation: forwards only. Raises ScheduleError if it is illegal."""
    order = add_sharding(add_communication(forward_only(order), forward_links(metas), ()), sharded)
    refuse_illegal(order)
    return order


def _refuse_untrained(order: Schedule, metas: Sequence[StageMeta]) -> None:
    trained = stages_with_backward(order)
    untrained = [meta.index for meta in metas if needs_backward(meta) and meta.index not in trained]
    if untrained:
        raise ScheduleError(
            f"schedule {order.name!r} has no backward for stage {untrained[0]}, which holds parameters to train or "
            "hands a gradient on; give a schedule with its backward, or freeze what is not to be trained"
        )


def refuse_illegal(order: Schedule) -> None:
    """Raises ScheduleError for a schedule that cannot be run."""
    wrong = [violation for violation in check(order) if violation.fatal]
    if wrong:
        raise ScheduleError(f"schedule {order.name!r} cannot be run: {summary(wrong)}")

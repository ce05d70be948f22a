"""From the schedule that a user gives to the one that runs: the order of work, then its messages and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from penstock._base.aliases import schedule_of_peer
from penstock._base.errors import ArgumentError, ScheduleError
from penstock._base.formatting import pluralize
from penstock._base.stages import StageMeta, backward_links, forward_links, merge_links, needs_backward
from penstock.schedule import (
    MICROBATCHES,
    Op,
    Schedule,
    add_communication,
    add_sharding,
    drop_backward,
    forward_only,
    generate,
    merge_last_backward,
    reduce_replicas,
    reduce_ties,
    stages_with_backward,
    truncate_microbatches,
)
from penstock.schedule.check import require_legal
from penstock.schedule.passes import compute_only


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The stages that `fully_shard` was applied to, and how many of a rank's may be gathered at once (None: all)."""

    stages: Set[int] = frozenset()
    window: int | None = None

    def with_gathers(self, order: Schedule, pattern: Schedule | None, keep: Callable[[Schedule], Schedule]) -> Schedule:
        """Return the computations of the order that `keep` keeps, with gathers, placed as in `pattern`'s order.

        A stage is gathered as often as in `pattern`, and reduces its gradients in the same place between gathers: its
        last backward is that of the same microbatch. So replicas with fewer microbatches do the same collectives in
        the same order.
        """

        def add_gathers(schedule: Schedule) -> Schedule:
            return add_sharding(keep(merge_last_backward(schedule, self.stages)), self.stages, self.window)

        if pattern is None or self.window is None or pattern.microbatches == order.microbatches:
            return add_gathers(order)
        full = add_gathers(pattern)
        last = {a.stage: a.microbatch for row in full.rows for a in row if a.op is Op.B and a.stage in self.stages}
        reduced_in = {number for number in last.values() if number is not None}
        return truncate_microbatches(full, order.microbatches, reduced_in)


UNSHARDED = GatherPlan()
"""No stage is sharded: each replica holds all parameters."""


def resolve_order(schedule: str | Schedule, ranks: int, microbatches: int | None, chunks: int | None) -> Schedule:
    """Return the computations of a schedule, given by name or as a `Schedule`, for this many ranks.

    Raises:
        ArgumentError: it does not fit these numbers.
        ScheduleError: it is illegal, or could deadlock.
    """
    if isinstance(schedule, str):
        schedule = generate(schedule, ranks, MICROBATCHES if microbatches is None else microbatches, chunks)
        microbatches = chunks = None
    _check_schedule_type(schedule)
    if schedule.ranks != ranks:
        raise ArgumentError(
            f"schedule {schedule.name!r} is for {pluralize(schedule.ranks, 'rank')}, but there are {ranks}"
        )
    if microbatches not in (None, schedule.microbatches):
        raise ArgumentError(
            f"microbatches={microbatches}, but schedule {schedule.name!r} is for {schedule.microbatches}; "
            "leave microbatches out, or make the schedule for as many"
        )
    if chunks is not None and chunks * ranks != schedule.stages:
        raise ArgumentError(
            f"stages_per_rank={chunks}, but schedule {schedule.name!r} has {schedule.stages} stages on "
            f"{pluralize(ranks, 'rank')}; omit stages_per_rank=, or make the schedule for as many"
        )
    return require_legal(compute_only(schedule))


def _check_schedule_type(schedule: object) -> None:
    if isinstance(schedule, Schedule):
        return
    peer = schedule_of_peer(getattr(schedule, "__name__", type(schedule).__name__))
    hint = f"; pass {peer}" if peer else "; pass what this returns" if callable(schedule) else ""
    raise ArgumentError(
        f"schedule={schedule!r}: expected a name, such as '1f1b', or a penstock.schedule.Schedule{hint}"
    )


def lower_training(
    order: Schedule,
    metas_by_kind: Sequence[Sequence[StageMeta]],
    ties: Sequence[Sequence[int]],
    sharded: GatherPlan,
    replicas_like: Schedule | None,
) -> Schedule:
    """Build the schedule of a training step.

    Args:
        order: computations only.
        metas_by_kind: all stages' metas, for each kind of microbatch.
        ties: the stages of each group of tied parameters.
        sharded: the stages that `fully_shard` was applied to.
        replicas_like: the schedule in whose order replicas reduce and gather, of which `order` is the first
            microbatches; None: there are no replicas.

    Raises:
        ArgumentError: the window of `sharded` is too narrow for what the schedule runs at once.
        ScheduleError: it is illegal, or has no backward for a stage that must be trained.
    """
    needed = {meta.index for metas in metas_by_kind for meta in metas if needs_backward(meta)}
    idle = [meta.index for meta in metas_by_kind[0] if meta.index not in needed]
    order = sharded.with_gathers(order, replicas_like, lambda s: drop_backward(s, idle))
    order = add_communication(
        order, merge_links(metas_by_kind, forward_links), merge_links(metas_by_kind, backward_links)
    )
    order = reduce_ties(order, ties)
    if replicas_like is not None:
        trained = {meta.index for metas in metas_by_kind for meta in metas if meta.trainable}
        order = reduce_replicas(order, trained, replicas_like)
    _check_trained(order, needed)
    return require_legal(order)


def lower_evaluation(
    order: Schedule, metas_by_kind: Sequence[Sequence[StageMeta]], sharded: GatherPlan, replicas_like: Schedule | None
) -> Schedule:
    """Build the schedule of an evaluation: forwards only. Arguments and errors are those of `lower_training`."""
    order = sharded.with_gathers(order, replicas_like, forward_only)
    order = add_communication(order, merge_links(metas_by_kind, forward_links), ())
    return require_legal(order)


def _check_trained(order: Schedule, needed: Set[int]) -> None:
    untrained = sorted(needed - stages_with_backward(order))
    if untrained:
        raise ScheduleError(
            f"schedule {order.name!r} has no backward for stage {untrained[0]}, which holds parameters to train or "
            "hands a gradient on; pass a schedule with its backward, or freeze what is not to be trained"
        )

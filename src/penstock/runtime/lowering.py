"""From the order of work to what is run for one recording: messages, reductions, and nothing that is not needed."""

from __future__ import annotations

from collections.abc import Sequence, Set

from penstock.errors import ScheduleError
from penstock.schedule import (
    Schedule,
    add_communication,
    add_sharding,
    check,
    drop_backward,
    forward_only,
    reduce_replicas,
    reduce_ties,
    stages_with_backward,
    whole_last_backward,
)
from penstock.stages import StageMeta, backward_links, forward_links, needs_backward


def lower_training(
    order: Schedule,
    metas: Sequence[StageMeta],
    ties: Sequence[Sequence[int]],
    sharded: Set[int],
    replicas_like: Schedule | None,
) -> Schedule:
    """The schedule of a training step.

    Args:
        order: computations alone.
        metas: of all stages.
        ties: the stages of each group of tied parameters.
        sharded: the stages that `fully_shard` was applied to.
        replicas_like: the schedule in whose order replicas reduce; None: there are none.

    Raises:
        ScheduleError: it is not legal, or a stage that is to be trained has no backward in it.
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
    """The schedule of an evaluation: forwards alone. Raises ScheduleError if it is not legal."""
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
        raise ScheduleError(f"schedule {order.name!r} cannot be run: " + "; ".join(v.text for v in wrong[:3]))

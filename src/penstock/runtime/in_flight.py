"""Stages that cannot have several microbatches in flight: their forward updates what their backward uses."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import PartitionError
from penstock.partition import Stage
from penstock.schedule import Action, Op


def refuse_in_flight(stage: Stage, row: Iterable[Action]) -> None:
    """Refuses a schedule in which a stage runs a forward before the backward of another microbatch is done.

    On one device a microbatch's backward uses the parameters and buffers as its own forward has left them.

    Args:
        row: the actions of the stage's rank, in order.

    Raises:
        PartitionError: the schedule does so, and the forward updates what backward uses.
    """
    if not stage.overwritten:
        return
    mine = [action for action in row if action.stage == stage.meta.index and action.op.is_compute]
    last = {action.microbatch: place for place, action in enumerate(mine)}
    for place, action in enumerate(mine):
        others = [one for one in mine[place + 1 : last[action.microbatch]] if one.microbatch != action.microbatch]
        if any(one.op is Op.F for one in others):
            raise PartitionError(
                f"the forward of stage {stage.meta.index} updates {stage.overwritten[0]} in place although its "
                "backward uses it, so that the backward of one microbatch would find what the forward of another has "
                "written. Update it after the step, let the forward use a clone of it, or choose schedule='naive' or "
                "microbatches=1"
            )

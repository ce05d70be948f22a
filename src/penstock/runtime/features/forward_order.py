"""Refuses stages that keep something from one forward to the next, as batch norm does, unless forwards run in order.

They run in order on one device, and in all of Penstock's schedules except those with two copies of a stage, which
`model/copies.py` checks. A user's own schedule may run forwards in any order.
"""

from __future__ import annotations

from penstock.errors import PartitionError
from penstock.runtime.features.context import StageContext
from penstock.schedule import Op


def check_forward_order(stage: StageContext) -> None:
    """Raises PartitionError if forwards are not in order and the recording shows that the stage keeps something.

    The statistics of deferred batch norms are merged in order at the end of the step.
    """
    if stage.copies or stage.in_order(Op.F):
        return
    one, norms = stage.stage, stage.binding.norms
    deferred = {id(buffer) for buffer in norms.buffers()} if norms else set()
    updated = [repr(name) for name in one.meta.updated if id(one.buffers.get(name)) not in deferred]
    for carried in (*updated, *(each.text for each in one.remembered)):
        raise PartitionError(
            f"the forward of stage {stage.index} carries {carried} over from one microbatch to the next, but this "
            f"schedule runs its forwards in the order {', '.join(map(str, stage.microbatches(Op.F)))}; take one that "
            "runs them in order of microbatch (1f1b, gpipe), or defer batch norm (deferred_batch_norm=True)"
        )

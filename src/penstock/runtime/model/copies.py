"""Several copies of a model in one pipeline, as in bidirectional schedules: each copy adds its stages.

The stages of a copy run the same code on the same parameters. If one rank holds a stage's copy and another its
original, the two are tied like any parameter that several stages hold.
"""

from __future__ import annotations

from dataclasses import replace

from penstock._base.errors import PartitionError
from penstock._base.stages import shifted
from penstock.partition.state.remembered import refuse_copies
from penstock.runtime.front_end import Partition


def with_copies(partition: Partition, pipelines: int) -> Partition:
    """The partition with its stages repeated for each pipeline and numbered consecutively.

    Raises:
        PartitionError: the forward updates a buffer, for which each copy would see only part of the batch.
    """
    if pipelines == 1:
        return partition
    stages = partition.stages
    for stage in stages:
        if stage.meta.updated:
            raise PartitionError(
                f"the forward updates {stage.meta.updated[0]!r} of stage {stage.meta.index}, but this schedule runs "
                f"{pipelines} copies of the stage, each of which would see only part of the batch; use a schedule "
                "with one copy (dualpipe-v for dualpipe), or keep the buffer fixed (a batch norm in eval mode)"
            )
        refuse_copies(stage.meta.index, stage.remembered, pipelines)
    copied = [
        replace(stage, meta=shifted(stage.meta, copy * len(stages))) for copy in range(pipelines) for stage in stages
    ]
    return replace(partition, stages=tuple(copied), draw_offsets=partition.draw_offsets * pipelines)

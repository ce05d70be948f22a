"""When each rank's actions ran, given to every rank.

All ranks know all rows, so only times travel, as integers in one array: actions that were pickled took longer than
noting the times, and a tensor takes longer than an array.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from penstock._base.process import cores
from penstock.runtime.execute.clock import Moment
from penstock.runtime.execute.engine import Engine
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline


def share_timeline(
    engine: Engine, schedule: Schedule, moments: Mapping[int, Sequence[Moment]], *, wanted: bool
) -> Timeline | None:
    """The timeline of a step, on every rank; None if it is not wanted. Every rank calls it.

    Args:
        moments: by rank of this process, in the order of its row.
    """
    if not wanted:
        return None
    times = {rank: [(began, ready, ended) for _, began, ready, ended in row] for rank, row in moments.items()}
    if engine.world.is_local:
        return Timeline.of_rows(schedule.rows, [times[rank] for rank in engine.ranks], in_turns=True)
    on_cpu, here = engine.devices[engine.ranks[0]].type == "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    crowded = on_cpu and here * torch.get_num_threads() > cores()
    everyone = engine.control.gather_line(np.array(times[engine.ranks[0]], dtype=np.int64), "the timeline")
    return Timeline.of_rows(schedule.rows, [one.tolist() for one in everyone], crowded=crowded)

"""The naive pipeline: one rank works at a time. The baseline that every other schedule is measured against."""

from __future__ import annotations

from array import array

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def naive(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Run a microbatch all the way forward and all the way backward before the next one starts.

    With 3 ranks and 2 microbatches, one column per time slot:

        rank 0 | F0 .  .  .  .  B0 F1 .  .  .  .  B1
        rank 1 | .  F0 .  .  B0 .  .  F1 .  .  B1 .
        rank 2 | .  .  F0 B0 .  .  .  .  F1 B1 .  .

    At any time p - 1 of the p ranks wait, however many microbatches there are: m of them take m p (F + B). In return a
    rank never holds more than one microbatch's activations, and at most one message is in flight, so this is also the
    schedule in which faults are easiest to find.

    The textbook's model parallelism; no paper claims it.
    """
    placement = Placement.loop(ranks, chunks)
    rows = []
    for rank in range(ranks):
        stages = placement.stages_on(rank)
        stage = array("i", [*stages, *reversed(stages)]) * microbatches
        op = array("b", [Op.F.code] * chunks + [Op.B.code] * chunks) * microbatches
        rows.append(
            Row.from_columns(stage, op, array("i", [k for k in range(microbatches) for _ in range(2 * chunks)]))
        )
    return Schedule("naive", placement, microbatches, rows)

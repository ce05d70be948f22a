"""1F1B: backwards start as soon as they can, so activations are freed as soon as possible."""

from __future__ import annotations

from array import array

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Run a few forwards to fill the pipeline, then alternate forwards and backwards, then the remaining backwards.

    With 4 ranks and 6 microbatches, one column per time slot:

        rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
        rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
        rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .

    The last rank can turn each microbatch round immediately: F0 B0 F1 B1 ... The gradient of microbatch 0 needs
    p - 1 - r more steps down to rank r, and in that time rank r can run p - 1 - r more forwards. So:

        warm-up      min(p - 1 - r, m) forwards
        steady       a forward, then a backward, while there are forwards
        cool-down    the remaining backwards, as many as the warm-up had forwards

    It takes as long as GPipe, (m + p - 1)(F + B): the same p - 1 slots are lost in each direction. But in the steady
    phase each forward is followed by the backward that frees a microbatch, so rank r holds the activations of at most
    min(p - r, m) microbatches, while GPipe holds m. With m < p the steady phase vanishes on the first ranks, and
    nothing else changes.

    The flushing variant ("PipeDream-Flush") of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    ICML 2021, as scheduled by Megatron-LM: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC 2021.
    """
    rows, numbers = [], array("i", range(microbatches))
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, microbatches)
        forwards = Row.of(Op.F, rank, numbers)
        backwards = Row.of(Op.B, rank, numbers)
        steady = Row.alternate(forwards.part(warm_up, None), backwards.part(0, microbatches - warm_up))
        row = forwards.part(0, warm_up) + steady + backwards.part(microbatches - warm_up, None)
        rows.append(Row.from_columns(row.stage, row.op, row.microbatch))
    return Schedule("1f1b", Placement.loop(ranks), microbatches, rows)

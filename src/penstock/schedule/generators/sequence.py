"""Seq1F1B: 1F1B whose microbatches are cut along the sequence, so that the pipeline fills with smaller pieces."""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def seq1f1b(ranks: int, microbatches: int, slices: int = 2) -> Schedule:
    """1F1B over slices of microbatches: the slices go forward in order, and back in reverse.

    With 3 ranks, 3 microbatches and 2 slices, one column per time slot (slice j of microbatch k has number 2k + j):

        rank 0 | F0 F1 F2 F3 .  .  B1 F4 B0 F5 B3 .  B2 .  B5 B4
        rank 1 | .  F0 F1 F2 .  B1 F3 B0 F4 B3 F5 B2 .  B5 B4 .
        rank 2 | .  .  F0 F1 B1 F2 B0 F3 B3 F4 B2 F5 B5 B4 .  .

    With attention, a token sees those before it. So slice j goes forward after the slices before it, whose keys and
    values it needs, and back before them, since they get a gradient from it: backwards can start only when the last
    slice of a microbatch has gone forward. On each rank, in slices:

        warm-up      p - r - 1 + j forwards, j being the number of slices
        then         a backward, then a forward, as long as there are any

    A slice is j times shorter than a microbatch, and so is the bubble, (p - 1)(F + B)/j; rank r holds p - r - 1 + j
    slices, slightly more than p - r microbatches divided by j. (Later slices attend to more tokens, so slices of equal
    length do not take equal time; the paper cuts them unevenly.)

    Running it takes a model that hands keys and values from slice to slice. Penstock generates, checks and times it.

    Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", NAACL 2025.
    """
    total = microbatches * slices
    back = [k * slices + j for k in range(microbatches) for j in reversed(range(slices))]
    rows = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank + slices, total)
        forwards, backwards = Row.of(Op.F, rank, range(total)), Row.of(Op.B, rank, back)
        steady = Row.alternate(backwards.part(0, total - warm_up), forwards.part(warm_up, None))
        rows.append(forwards.part(0, warm_up) + steady + backwards.part(total - warm_up, None))
    return Schedule("seq1f1b", Placement.loop(ranks), microbatches, rows, slices)

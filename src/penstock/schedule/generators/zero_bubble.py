"""ZB-H1 and ZB-H2: weight gradients, which nothing waits for, fill the bubbles of 1F1B."""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with split backwards: rank r computes its weight gradients r microbatches late.

    With 4 ranks and 6 microbatches, one column per time slot:

        rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    B has two parts: I, the gradient of the stage's inputs, which the rank below waits for, and W, the gradient of its
    weights, which nothing waits for. So W may come later, when there is nothing else to do. On each rank:

        warm-up      p - r forwards
        then         I of microbatch k, W of microbatch k - r, the next forward: while there are any
        at the end   the last r weight gradients

    The last rank sends each gradient W earlier than 1F1B's, the rank before it too, and so on: gradients come down the
    pipeline faster, and the postponed work is done at the end, where 1F1B idles. Of 1F1B's bubble of
    (p - 1)(F + I + W), (p - 1)(F + I - W) remains, a third if all three take equally long, and never less than
    (p - 1)I: a W longer than F fills no more. Rank r holds up to p - r microbatches for their I and r for their W: p on
    every rank, as much as 1F1B's first rank.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1.
    """
    return _split(ranks, microbatches, 1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 with twice the distance: twice the forwards in advance, and weight gradients 2r microbatches late.

    With 3 ranks and 6 microbatches, one column per time slot:

        rank 0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

        warm-up      2(p - 1 - r) + 1 forwards
        then         I of microbatch k, W of microbatch k - 2r, the next forward: while there are any
        at the end   the last 2r weight gradients

    While the first gradient is on its way, where ZB-H1 idles, rank 0 runs p - 1 more forwards. If F, I and W take
    equally long, no rank waits once it has begun; otherwise it waits (p - 1)(F + I - 2W). Ranks end one after the
    other, just as they began: the last one (p - 1)F after the first. So the gain is in the time that each rank takes
    (the span); an optimizer that waits for all ranks undoes it, and the paper does without one. Every rank holds up to
    2p - 1 microbatches.

    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2.
    """
    return _split(ranks, microbatches, 2)


def _split(ranks: int, microbatches: int, distance: int) -> Schedule:
    """Run each rank `distance` microbatches ahead of the next one, and compute its weight gradients as many later."""
    rows = []
    for rank in range(ranks):
        warm_up, late = distance * (ranks - 1 - rank) + 1, distance * rank
        row = [Action(rank, Op.F, k) for k in range(min(warm_up, microbatches))]
        for k in range(microbatches):
            row.append(Action(rank, Op.I, k))
            if k >= late:
                row.append(Action(rank, Op.W, k - late))
            if warm_up + k < microbatches:
                row.append(Action(rank, Op.F, warm_up + k))
        row += [Action(rank, Op.W, k) for k in range(max(microbatches - late, 0), microbatches)]
        rows.append(Row(row))
    return Schedule(f"zb-h{distance}", Placement.loop(ranks), microbatches, rows)

"""ZB-V: zero bubble in the memory of 1F1B, with two chunks per rank, placed as a V."""

from __future__ import annotations

from penstock.schedule.generators.slots import RowWriter
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Run a microbatch down the ranks and up again, and its gradient the same way. Rank r owns stages r and 2p - 1 - r.

    With 2 ranks and 5 microbatches, one column per time slot:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0F4 0I1 0W1 3F3 3I3 3W3 0I2 0W2 3F4 3I4 3W4
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1F4 1I2 1W2 2F4 2I3 2W3 1I3

        rank 0 | 0I3 0W3 0I4 0W4 .
        rank 1 | 2I4 1I4 1W3 2W4 1W4

    On a V the last stage is on rank 0, like the first: the loss is there p forwards after a microbatch has passed the
    last rank, and its gradient starts immediately, down the second chunks and up the first. So rank 0, which in 1F1B
    waits longest for its first gradient, is the first to get one. If a is the stage of the first chunk and b that of
    the second, rank r runs:

        warm-up      2(p - r) - 1 times     F of a
                     r times                F of b, F of a
                     p - r times            F of b, I and W of b
        steady       while there are any    F of a, I and W of a, F of b, I and W of b
        cool-down    r times                I of a, I of b
                     p - r times            I of a, W of a
                     at the end             the remaining weight gradients of b, then of a

    If F, I and W take equally long, no rank waits from its first action to its last (the span), and the last one ends
    p - 1 slots after the first. Every rank holds the activations of up to 2p chunks, worth p microbatches, like 1F1B's
    first rank. Fewer than 2p - 1 microbatches run as 2p - 1 would, without the missing ones.

    If the three do not take equally long, another order may be better: `penstock search --placement v` finds it.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, section 6; this order of it is PyTorch's.
    """
    run = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        a, b = rank, 2 * ranks - 1 - rank
        out = RowWriter()
        for _ in range(2 * (ranks - rank) - 1):
            out.forward(a)
        for _ in range(rank):
            out.forward(b)
            out.forward(a)
        for _ in range(ranks - rank):
            out.forward(b)
            out.input_gradient(b)
            out.weight_gradient()
        while out.forwards(b) < run:
            if out.forwards(a) < run:
                out.forward(a)
            out.input_gradient(a)
            out.weight_gradient()
            out.forward(b)
            out.input_gradient(b)
            out.weight_gradient()
        for _ in range(rank):
            out.input_gradient(a)
            out.input_gradient(b)
        for _ in range(ranks - rank):
            out.input_gradient(a)
            out.weight_gradient(a)
        out.weight_gradients(b)
        out.weight_gradients(a)
        rows.append(out.within(dict.fromkeys((a, b), range(microbatches))))
    return Schedule("zb-v", Placement.v(ranks), microbatches, rows)

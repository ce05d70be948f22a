"""Chimera: two 1F1B pipelines in opposite directions, each in the other's bubbles."""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.generators.slots import rows_by_slot
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Run two copies of the model, one down the ranks and one up; each takes half the microbatches.

    With 4 ranks and 8 microbatches, one column per time slot (stages 4 to 7 are the second copy):

        rank 0 | 0F0 0F1 .   7F4 7B4 7F5 7B5 0B0 0F2 0B1 0F3 7F6 7B6 7F7 7B7 0B2 .   0B3
        rank 1 | .   1F0 6F4 1F1 6F5 6B4 1B0 6B5 1B1 1F2 6F6 1F3 6F7 6B6 1B2 6B7 1B3 .
        rank 2 | .   5F4 2F0 5F5 2F1 2B0 5B4 2B1 5B5 5F6 2F2 5F7 2F3 2B2 5B6 2B3 5B7 .
        rank 3 | 4F4 4F5 .   3F0 3B0 3F1 3B1 4B4 4F6 4B5 4F7 3F2 3B2 3F3 3B3 4B6 .   4B7

    In one direction, a microbatch enters every second slot, goes through the p stages without waiting, and back:

        F of stage s, microbatch k, in slot       s + 2k
        B of stage s, microbatch k, in slot       2p - 1 - s + 2k

    On rank r that is stage r, whose forwards are in slots of r's parity. The copy in the other direction has stage p -
    1 - r there, whose backwards are in slots of that parity: with p even, the two never want the same slot, nor do its
    forwards and the first one's backwards. p/2 microbatches in each direction form a unit; the next unit begins 2p
    slots later, and fits without a gap if forward and backward take equally long.

    With m = p microbatches a rank waits p - 2 slots; with 1F1B it waits 2(p - 1). It holds the activations of at most
    min(r, p - 1 - r) + p/2 + 1 microbatches, and two copies of its parameters, whose gradients are added at the end.

    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC 2021,
    with units concatenated directly.
    """
    placement, half = Placement.bidirectional(ranks), ranks // 2
    slots = []
    for copy in range(2):
        for i in range(microbatches // 2):
            k = i + copy * (microbatches // 2)
            start = 2 * (i % half) + 2 * ranks * (i // half)
            for s in range(ranks):
                slots.append((start + s, Action(copy * ranks + s, Op.F, k)))
                slots.append((start + 2 * ranks - 1 - s, Action(copy * ranks + s, Op.B, k)))
    return Schedule("chimera", placement, microbatches, rows_by_slot(placement, slots))

"""Hanayo: the pipeline runs in waves, down the ranks and up again, several times."""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.generators.slots import rows_by_slot
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def hanayo(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Place two chunks per wave: a microbatch goes down all ranks and up again, chunks / 2 times, and back the same
    way.

    With 4 ranks, 4 microbatches and 2 chunks (one wave), one column per time slot:

        rank 0 | 0F0 0F1 0F2 0F3 .   .   .   7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 .   0B1 .   0B2 .   0B3
        rank 1 | .   1F0 1F1 1F2 1F3 .   6F0 .   6F1 6B0 6F2 6B1 6F3 6B2 1B0 6B3 1B1 .   1B2 .   1B3 .
        rank 2 | .   .   2F0 2F1 2F2 5F0 2F3 5F1 .   5F2 5B0 5F3 5B1 2B0 5B2 2B1 5B3 2B2 .   2B3 .   .
        rank 3 | .   .   .   3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 3B0 4B1 3B1 4B2 3B2 4B3 3B3 .   .   .

    Where the wave turns, the next stage is on the same rank, so nothing has to be sent. And a rank that is idle in one
    direction is met by the wave on its way back: Chimera gets this from a second copy of the model, but here there is
    only one copy. More waves make stages shorter, and the way to the first backward no longer: the bubble shrinks as
    that of interleaved 1F1B does.

    p microbatches form a group. Slot by slot, each rank runs what is ready in it: a backward of the earliest
    microbatch, if there is one; otherwise the forward of its highest stage. The next group begins when the ranks have
    had as many slots as a group has work, and fills the gaps that this one leaves. A rank holds the activations of at
    most p microbatches.

    Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency", SC
    2023.
    """
    placement = Placement.wave(ranks, chunks // 2)
    group, slots = ranks, []
    for first in range(0, microbatches, group):
        start = 2 * chunks * group * (first // group)
        for slot, action in _group(placement, min(group, microbatches - first)):
            assert action.microbatch is not None
            slots.append((start + slot, Action(action.stage, action.op, first + action.microbatch)))
    return Schedule("hanayo", placement, microbatches, rows_by_slot(placement, slots))


def _group(placement: Placement, microbatches: int) -> list[tuple[int, Action]]:
    """Return the actions of one group with their slots, each as soon as its rank is free."""
    stages, top = range(placement.stages), placement.stages - 1
    forwards, backwards = [0] * placement.stages, [0] * placement.stages  # how many each stage has done
    slots: list[tuple[int, Action]] = []
    slot = 0
    while min(backwards) < microbatches:
        chosen = []
        for rank in range(placement.ranks):
            local = placement.stages_on(rank)
            ready = [(backwards[s], s) for s in local if backwards[s] < (forwards[s] if s == top else backwards[s + 1])]
            if ready:
                k, stage = min(ready)
                chosen.append(Action(stage, Op.B, k))
                continue
            ready_forwards = [s for s in local if forwards[s] < (microbatches if s == 0 else forwards[s - 1])]
            if ready_forwards:
                chosen.append(Action(max(ready_forwards), Op.F, forwards[max(ready_forwards)]))
        for action in chosen:
            done = forwards if action.op is Op.F else backwards
            done[action.stage] += 1
        slots += [(slot, action) for action in chosen]
        slot += 1
    assert all(done == microbatches for done in (forwards[s] for s in stages))
    return slots

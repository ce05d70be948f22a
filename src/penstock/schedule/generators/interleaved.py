"""Interleaved 1F1B: several smaller stages per rank, so that the pipeline fills and drains in smaller steps."""

from __future__ import annotations

from itertools import pairwise

from penstock.schedule.action import Action, Op
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over chunks: rank r owns the stages r, p + r, 2p + r, ..., and the microbatches go round in groups.

    With 2 ranks, 4 microbatches and 2 chunks, one column per time slot:

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    A group of p microbatches passes the first chunk of every rank, then the second, and so on; by the time the last
    rank is done with the group's first microbatch, rank 0 is done with the group's last one and is free for the next
    chunk. Then comes the next group. The backwards go round in the same groups, through the chunks in reverse. On each
    rank:

        warm-up      2(p - 1 - r) + (v - 1)p + 1 forwards, a forward being that of one chunk
        then         a backward, then a forward, as long as there are any

    A chunk is v times shorter than a whole rank's work, and so is the way to the last rank: the bubble is 1F1B's
    divided by v, (p - 1)(F + B)/v with F and B a rank's. The price is v times as many messages, and the activations of
    (v - 1)p + 1 + 2(p - 1 - r) chunks on rank r, which is more than 1F1B's p - r microbatches.

    The schedule was published for multiples of p microbatches. Here any number will do: m microbatches form m // p
    groups (one, if m < p) whose sizes differ by at most one. No group is smaller than p, so none leaves a gap that the
    next chunk has to wait for, and the bubble stays the same; a group of p + x holds (v - 1)x more chunks.

    If messages take time, groups of exactly p wait for each microbatch to come round, p c each time, in the warm-up and
    in the cool-down: with a latency of c the step takes m(F + B) + (p - 1)(F + B)/v + (2pv - 2)c. (Published tables
    with (2pv - p - 2)c let only the first microbatch of a group wait for its message from the last rank.)

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
    """
    placement = Placement.loop(ranks, chunks)
    rounds = max(1, microbatches // ranks)
    ends = [-(-microbatches * i // rounds) for i in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(ends)]
    rows = []
    for rank in range(ranks):
        stages = placement.stages_on(rank)
        forwards = [Action(stage, Op.F, k) for group in groups for stage in stages for k in group]
        backwards = [Action(stage, Op.B, k) for group in groups for stage in reversed(stages) for k in group]
        warm_up = 2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0]) + 1
        row = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            row += [backward, *forwards[warm_up + i : warm_up + i + 1]]
        rows.append(Row(row))
    return Schedule("interleaved-1f1b", placement, microbatches, rows)

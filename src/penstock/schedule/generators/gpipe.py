"""GPipe and its looped form: all forwards, then all backwards."""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Run every microbatch forward, then every microbatch backward, in the same ascending order.

    With 4 ranks and 4 microbatches, one column per time slot:

        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
        rank 3 | .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

    Rank r starts r slots late and its last backward ends r slots early, so each rank idles p - 1 slots in each
    direction, whatever m is: the step takes (m + p - 1)(F + B), and the bubble's share, (p - 1)/(m + p - 1), shrinks as
    microbatches are added. The price is memory: nothing is freed before the first backward, so each rank holds the
    activations of all m microbatches.

    The paper's figure draws the backwards in descending order. The time is the same either way; in ascending order, the
    weight gradients are added up in the order in which one device adds them, so they have the same bits.

    With several chunks per rank this is the looped form: see `looped_bfs`.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
    """
    return _breadth_first("gpipe", ranks, microbatches, chunks)


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """GPipe over several chunks per rank: every microbatch goes through a chunk before the next chunk starts.

    With 2 ranks, 3 microbatches and 2 chunks, one column per time slot:

        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
        rank 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2 .

    Breadth first: a rank works on one stage until it runs out of microbatches. The pipeline fills and drains in steps
    of a chunk, so the bubble is GPipe's divided by v, and a rank that shards its parameters gathers each of its stages
    only twice per step: once forward, once back. As in GPipe, the activations of all m microbatches are held.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
    """
    return _breadth_first("looped-bfs", ranks, microbatches, chunks)


def _breadth_first(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    placement = Placement.loop(ranks, chunks)
    rows = []
    for rank in range(ranks):
        stages = placement.stages_on(rank)
        row = Row()
        for op, order in ((Op.F, stages), (Op.B, stages[::-1])):
            for stage in order:
                row += Row.of(op, stage, range(microbatches))
        rows.append(row)
    return Schedule(name, placement, microbatches, rows)

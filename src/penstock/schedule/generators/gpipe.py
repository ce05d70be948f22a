"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from penstock.schedule.action import Action, Op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Every microbatch goes forward; then every microbatch goes back, in the same, ascending order.

    With 4 ranks and 4 microbatches, a column a slot of time:

        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
        rank 3 | .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .

    Rank r starts r slots late and its last backward ends r slots early, so each rank idles p - 1 slots in each
    direction, whatever m is: the whole takes (m + p - 1)(F + B), and the bubble's share, (p - 1)/(m + p - 1), shrinks
    as microbatches are added. The price is memory: nothing is freed before the first backward, so each rank holds
    the activations of all m microbatches.

    The paper's figure draws the backwards in descending order. The time is the same either way; ascending, the weight
    gradients are added up in the order in which one device adds them, and so have the same bits.

    With several chunks a rank, each chunk takes all microbatches before the next chunk starts, and the backwards go
    through the chunks the other way round.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
    """
    placement = Placement.loop(ranks, chunks)
    rows = []
    for rank in range(ranks):
        stages = placement.stages_on(rank)
        forwards = [Action(stage, Op.F, k) for stage in stages for k in range(microbatches)]
        backwards = [Action(stage, Op.B, k) for stage in reversed(stages) for k in range(microbatches)]
        rows.append(forwards + backwards)
    return Schedule("gpipe", placement, microbatches, rows)

"""Which activations an offloaded stage sends to the host: those that are away for long enough to make room.

What a forward saves takes its place on the device until the rank's next computation has ended, while it is sent, and
again from the beginning of the one before its backward, when it is fetched. So nothing is gained unless a whole
computation lies in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schedule import Action, Op, Schedule
from penstock.words import in_ranges

NEAR = 3
"""So many computations after a forward, its backward still finds everything on the device."""


@dataclass(frozen=True, slots=True)
class Trips:
    """The microbatches of a stage of which something goes to the host.

    Attributes:
        for_backward: what B or I needs.
        for_weights: what W needs.
        twice: what both need comes back for I, goes, and comes again for W.
    """

    for_backward: frozenset[int]
    for_weights: frozenset[int]
    twice: frozenset[int]

    @property
    def any(self) -> frozenset[int]:
        """Those of which anything goes."""
        return self.for_backward | self.for_weights


def trips(row: Sequence[Action], stage: int) -> Trips:
    """The trips that a stage's activations make.

    Args:
        row: the actions of the stage's rank, in order.
    """
    work = [action for action in row if action.op.is_compute]
    places: dict[Op, dict[int, int]] = {Op.F: {}, Op.I: {}, Op.W: {}}
    for place, action in enumerate(work):
        if action.stage == stage and action.microbatch is not None:
            places[Op.I if action.op is Op.B else action.op][action.microbatch] = place
    forward, backward, weights = places[Op.F], places[Op.I], places[Op.W]
    return Trips(
        frozenset(k for k, place in backward.items() if place - forward[k] > NEAR),
        frozenset(k for k, place in weights.items() if place - forward[k] > NEAR),
        frozenset(k for k, place in weights.items() if place - backward[k] >= NEAR),
    )


def notes(offload: Sequence[bool], order: Schedule, on_host: Sequence[bool]) -> list[str]:
    """Notes on what offload does not do.

    Args:
        offload: one per stage of the model.
        order: the schedule, with or without communication.
        on_host: for each rank, whether it computes on the CPU.
    """
    rank_of = order.placement.rank_of
    asked = [stage for stage in range(len(rank_of)) if offload[stage % len(offload)]]
    idle = [stage for stage in asked if not trips(order.rows[rank_of[stage]], stage).any]
    there = [stage for stage in asked if on_host[rank_of[stage]] and stage not in idle]
    found = []
    if idle:
        found.append(
            f"offload: nothing goes to the host on {_stages(idle)}, where each backward comes within {NEAR} "
            "computations of its forward: what travels meanwhile makes no room"
        )
    if there:
        found.append(f"offload: {_stages(there)} on the CPU: the copies are made, and save no memory")
    return found


def _stages(numbers: Sequence[int]) -> str:
    return f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(in_ranges(map(str, numbers)))}"

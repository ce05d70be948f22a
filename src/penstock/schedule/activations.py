"""What a stage keeps between a microbatch's forward and its backward, by the order of its rank's actions alone.

The runtime follows these rules, and a plan predicts by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.schedule.action import Action, Op

NEAR = 3
"""A backward at most this many computations after its forward finds its activations on the device."""


def recomputed_microbatches(
    select: Callable[[Sequence[int]], Collection[int]], row: Iterable[Action], stage: int
) -> frozenset[int]:
    """Return the microbatches of a stage whose forward is recomputed in backward.

    A forward directly followed by its backward does not: nothing would be kept for a shorter time.

    Args:
        select: from the stage's microbatches, in the order in which they run, those whose activations are kept.
        row: the actions of the stage's rank, in order.
    """
    work = [action for action in row if action.op.is_compute]
    forward_actions = (action for action in work if action.stage == stage and action.op is Op.F)
    forwards = [action.microbatch for action in forward_actions if action.microbatch is not None]
    backwards = {action.microbatch for action in work if action.stage == stage and action.op in (Op.B, Op.I)}
    immediate = {
        action.microbatch
        for action, following in pairwise(work)
        if action.stage == stage and action.op is Op.F
        if (following.stage, following.microbatch) == (stage, action.microbatch) and following.op in (Op.B, Op.I)
    }
    keeping = immediate | set(select(forwards))
    return frozenset(k for k in backwards - keeping if k is not None)


@dataclass(frozen=True, slots=True)
class OffloadTrips:
    """The microbatches of an offloaded stage whose activations, or a part of them, are copied to the host.

    What a forward saves takes its place on the device until the rank's next computation has ended, while it is sent,
    and again from the beginning of the one before its backward, when it is fetched. So nothing is gained unless a whole
    computation lies in between.

    Attributes:
        for_backward: what B or I needs.
        for_weights: what W needs.
        twice: what both need is copied back for I, offloaded again, and copied back for W.
    """

    for_backward: frozenset[int]
    for_weights: frozenset[int]
    twice: frozenset[int]

    @property
    def any(self) -> frozenset[int]:
        """All of them."""
        return self.for_backward | self.for_weights


def offload_trips(row: Sequence[Action], stage: int) -> OffloadTrips:
    """Return the offload trips of a stage's activations.

    Args:
        row: the actions of the stage's rank, in order.
    """
    work = [action for action in row if action.op.is_compute]
    positions: dict[Op, dict[int, int]] = {Op.F: {}, Op.I: {}, Op.W: {}}
    for index, action in enumerate(work):
        if action.stage == stage and action.microbatch is not None:
            positions[Op.I if action.op is Op.B else action.op][action.microbatch] = index
    forward, backward, weights = positions[Op.F], positions[Op.I], positions[Op.W]
    return OffloadTrips(
        frozenset(k for k, index in backward.items() if index - forward[k] > NEAR),
        frozenset(k for k, index in weights.items() if index - forward[k] > NEAR),
        frozenset(k for k, index in weights.items() if index - backward[k] >= NEAR),
    )

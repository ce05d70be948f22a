"""What a stage keeps between a microbatch's forward and its backward, by the order of its rank's actions alone.

The runtime follows these rules, and a plan predicts by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.schedule.action import Action, Op

NEAR = 3
"""So many computations after a forward, its backward still finds everything on the device."""


def run_again(keeping: Callable[[Sequence[int]], Collection[int]], row: Iterable[Action], stage: int) -> frozenset[int]:
    """Return the microbatches of a stage whose forward is recomputed in backward.

    A forward directly followed by its backward does not: nothing would be kept for a shorter time.

    Args:
        keeping: from the stage's microbatches, in the order in which they run, chooses those that keep their forward.
        row: the actions of the stage's rank, in order.
    """
    work = [action for action in row if action.op.is_compute]
    own = (action for action in work if action.stage == stage and action.op is Op.F)
    forwards = [action.microbatch for action in own if action.microbatch is not None]
    backwards = {action.microbatch for action in work if action.stage == stage and action.op in (Op.B, Op.I)}
    at_once = {
        action.microbatch
        for action, following in pairwise(work)
        if action.stage == stage and action.op is Op.F
        if (following.stage, following.microbatch) == (stage, action.microbatch) and following.op in (Op.B, Op.I)
    }
    kept = at_once | set(keeping(forwards))
    return frozenset(k for k in backwards - kept if k is not None)


@dataclass(frozen=True, slots=True)
class Trips:
    """The microbatches of an offloaded stage of which something goes to the host.

    What a forward saves takes its place on the device until the rank's next computation has ended, while it is sent,
    and again from the beginning of the one before its backward, when it is fetched. So nothing is gained unless a whole
    computation lies in between.

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
    """Return the offload trips of a stage's activations.

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

"""Parameters that several ranks hold: they start equal, and exactly those ranks sum their gradients.

A group consists of the parameters that the same set of stages holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from penstock._base.stages import ties_across_ranks
from penstock.runtime.gradients.sums import GradientSum
from penstock.runtime.processes.failure import Position
from penstock.runtime.transport.protocol import Pending, Transport


@dataclass(frozen=True, slots=True)
class TieGroup:
    """Parameters, by canonical name, that live on exactly these stages, and the ranks that hold the stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def tie_groups(ties: Mapping[str, Sequence[int]], rank_of: Sequence[int]) -> tuple[TieGroup, ...]:
    """The groups that span several ranks, in the order in which every rank reduces them."""
    return tuple(
        TieGroup(tuple(names), stages, tuple(sorted({rank_of[stage] for stage in stages})))
        for stages, names in ties_across_ranks(ties, rank_of).items()
    )


class TieReducer:
    """One rank's part in the reduction of a group.

    Args:
        numbers: the ranks' numbers in messages.
    """

    def __init__(
        self,
        index: int,
        group: TieGroup,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        numbers: Sequence[int],
    ) -> None:
        self.parameters = tuple(parameters)
        self._rank = transport.rank
        self._first = group.ranks[0]
        self._reduce = partial(transport.reduce, index, group.ranks)
        self._sum = GradientSum(parameters, self._reduce)
        self._pending: Pending | None = None

        peers = tuple(numbers[rank] for rank in group.ranks if rank != transport.rank)
        self.position = Position(f"REDUCE_GRAD{index}", peers)
        """The rank's position while it waits for the sum."""

    def start_equal(self) -> None:
        """Starts to copy the first rank's parameters to the others: a sum in which the others contribute zeros."""
        for parameter in self.parameters:
            if self._rank != self._first:
                parameter.data.zero_()
        self._pending = self._reduce([parameter.data for parameter in self.parameters])

    def end_equal(self) -> None:
        """Waits for the copies."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None

    def begin_step(self) -> None:
        """Sets aside what earlier steps accumulated."""
        self._sum.set_aside()

    def start(self) -> None:
        """Starts the sum."""
        self._sum.start()

    def end_step(self) -> None:
        """Waits for the sum and adds it to what was set aside."""
        self._sum.finish()

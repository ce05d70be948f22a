"""A transport made of others: one carries messages, another, or the same, does collectives."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.transport.protocol import Channel, Collectives, Pending, PointToPoint


class Paired:
    """One rank's side. Both parts may be one object."""

    def __init__(self, rank: int, ranks: int, messages: PointToPoint, collectives: Collectives) -> None:
        self.rank = rank
        self.ranks = ranks
        self.messages = messages
        self._collectives = collectives

    def connect(self, source_rank: int, target_rank: int) -> None:
        self.messages.connect(source_rank, target_rank)

    def channel(self, program: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Channel:
        return self.messages.channel(program, link, source_rank, target_rank, backward=backward)

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        return self._collectives.reduce(group, holders, tensors)

    def broadcast(self, value: Tensor, source_rank: int) -> Pending:
        return self._collectives.broadcast(value, source_rank)

    def release(self, program: int) -> None:
        self.messages.release(program)

    def end_step(self) -> None:
        self.messages.end_step()

    def drop_step(self) -> None:
        self.messages.drop_step()

    def close(self) -> None:
        parts: tuple[PointToPoint | Collectives, ...] = (self.messages, self._collectives)
        for part in {id(part): part for part in parts}.values():
            part.close()

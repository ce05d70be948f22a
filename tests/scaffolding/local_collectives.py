"""Local transports that do collectives, too: those of a process have no use for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.runtime.transport.routes import LocalHub, LocalTransport


class CollectiveHub(LocalHub):
    """What they share."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self.sums: dict[int, Sum] = {}
        self.broadcast = Broadcast()


class CollectiveTransport(LocalTransport):
    """One rank's side."""

    def __init__(self, rank: int, hub: CollectiveHub) -> None:
        super().__init__(rank, hub)
        self.hub = hub

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Sum:
        total = self.hub.sums.setdefault(group, Sum(len(holders)))
        total.add(tensors)
        if total.missing == 0:
            del self.hub.sums[group]
        return total

    def broadcast(self, value: Tensor, source_rank: int) -> Broadcast:
        broadcast = self.hub.broadcast
        if len(broadcast.buffers) == self.ranks:
            broadcast = self.hub.broadcast = Broadcast()
        broadcast.buffers.append(value)
        if self.rank == source_rank:
            broadcast.source = value
        return broadcast

    def drop_step(self) -> None:
        super().drop_step()
        self.hub.sums.clear()
        self.hub.broadcast = Broadcast()


def collective_transports(ranks: int = 2) -> dict[int, CollectiveTransport]:
    """One for each rank, on the CPU."""
    hub = CollectiveHub([torch.device("cpu")] * ranks)
    return {rank: CollectiveTransport(rank, hub) for rank in range(ranks)}


class Sum:
    """A sum, complete once every holder has added its terms."""

    def __init__(self, holders: int) -> None:
        self.missing = holders
        self._terms: list[Sequence[Tensor]] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        self._terms.append(tensors)
        self.missing -= 1

    def wait(self) -> None:
        terms, self._terms = self._terms, []
        for column in zip(*terms, strict=True):
            total = column[0].clone()
            for term in column[1:]:
                total += term.to(total.device)
            for term in column:
                term.copy_(total)


class Broadcast:
    """A value for which every rank has a buffer."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.source: Tensor | None = None

    def wait(self) -> None:
        if self.source is not None:
            for buffer in self.buffers:
                buffer.copy_(self.source)

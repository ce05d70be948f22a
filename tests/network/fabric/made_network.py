"""Two hosts and the link between them, made of numbers: time goes by as messages take it, whatever the machine does.

Each host is a thread with a clock of its own, which what it sends and gets moves on; so a run comes out the same again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from penstock.network.fabric.emulation.collectives import Message

OVERHEAD_BYTES = 156
"""Of a message: gloo's header, and the headers of two packets."""
PACKET_BYTES = 1514
LATE_SECONDS, LATE_SHARE = 3e-3, 0.1
"""How late a receiver is woken now and then."""


class Tcp:
    """A connection that starts slowly: ten packets, twice as many each round trip, and the link's rate at the end."""

    def __init__(self, bytes_per_second: float, delay_seconds: float) -> None:
        self.rate, self.trip, self.delay = bytes_per_second, 2 * delay_seconds, delay_seconds
        self.now, self.window = 0.0, 15_000.0

    def send(self, size: float) -> float:
        """When the last byte has left."""
        left = size
        while left > 0:
            part = min(self.window, left)
            left -= part
            if self.window < self.rate * self.trip:
                self.now += max(self.trip * part / self.window, part / self.rate)
                self.window += part
            else:
                self.now += part / self.rate
        return self.now


class TwoHosts:
    """Stands for `torch.distributed`, for `time` and for a wire, on the threads of two hosts."""

    def __init__(self, bytes_per_second: float, delay_seconds: float) -> None:
        self._here = threading.local()
        self._ways = {way: Tcp(bytes_per_second, delay_seconds) for way in ((0, 1), (1, 0))}
        self._under_way: dict[tuple[int, int], queue.Queue[tuple[float, Any]]] = {
            way: queue.Queue() for way in self._ways
        }

    def run(self, job: Callable[[], Any]) -> list[Any]:
        """What each host returns of it."""
        found: list[Any] = [None, None]

        def host(rank: int) -> None:
            self._here.rank, self._here.now = rank, 0.0
            self._here.draw = np.random.default_rng(rank)
            found[rank] = job()

        threads = [threading.Thread(target=host, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    # -- time

    def monotonic(self) -> float:
        now: float = self._here.now
        return now

    # -- torch.distributed

    def get_rank(self) -> int:
        rank: int = self._here.rank
        return rank

    def send(self, tensor: Tensor, to: int) -> None:
        self._leave(to, tensor.numel() * tensor.element_size(), tensor.clone())

    def recv(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._arrive(source))

    # -- a wire

    def expect(self, receives: Sequence[Message]) -> None:
        """Nobody waits for the word that a receiver is ready."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for message in sends:
            self._leave(message.peer, message.tensor.numel() * message.tensor.element_size(), None)
        for message in receives:
            self._arrive(message.peer)

    def _leave(self, to: int, size: int, what: Any) -> None:
        way = self._ways[self._here.rank, to]
        way.now = max(way.now, self._here.now)
        self._here.now = way.send(size + OVERHEAD_BYTES)
        # The last packet passes the receiver's end of the link as well.
        arrives = self._here.now + way.delay + min(size + OVERHEAD_BYTES, PACKET_BYTES) / way.rate
        self._under_way[self._here.rank, to].put((arrives, what))

    def _arrive(self, source: int) -> Any:
        at, what = self._under_way[source, self._here.rank].get(timeout=30)
        late = LATE_SECONDS * (self._here.draw.random() < LATE_SHARE)
        self._here.now = max(self._here.now, at + late)
        return what

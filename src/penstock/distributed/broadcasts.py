"""Small values that one rank sends to all others on its machine: one socket per pair of ranks, and no threads.

It carries each step's announcement and loss. A gloo broadcast would need several wake-ups of gloo's threads.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

BROADCASTS_IN_FLIGHT = 4
"""How many values from one rank may be in flight: two steps' losses and announcements. The next one waits for the first
to arrive, so that unread values do not pile up."""


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Raise ConnectionError if the other end closes first."""
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the other rank closed its connection")
        data += chunk
    return data


class Broadcasts:
    """One rank's side: `sockets` has a connected one for each other rank."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._arriving: dict[int, deque[Broadcast]] = {peer: deque() for peer in sockets}
        self._lock = threading.Lock()

    def start(self, value: Tensor, source_rank: int) -> Broadcast:
        """Start to copy a contiguous float64 tensor on the CPU, in place, from one rank to all."""
        broadcast = Broadcast(self, value, source_rank)
        if source_rank == self._rank:
            broadcast.arrived = True
            for connection in self._sockets.values():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a receiver may have ended already
                    connection.sendall(value.numpy().tobytes())
            return broadcast
        arriving = self._arriving[source_rank]
        if len(arriving) >= BROADCASTS_IN_FLIGHT:
            arriving[-BROADCASTS_IN_FLIGHT].wait()
        arriving.append(broadcast)
        return broadcast

    def receive(self, awaited: Broadcast, source_rank: int) -> None:
        """Wait until a value from a rank has arrived. They arrive in order, whichever thread waits."""
        with self._lock:
            while not awaited.arrived:
                self._receive_next(source_rank)

    def _receive_next(self, source_rank: int) -> None:
        broadcast = self._arriving[source_rank][0]
        data = bytearray(
            receive_exactly(self._sockets[source_rank], broadcast.value.numel() * broadcast.value.itemsize)
        )
        broadcast.value.copy_(torch.frombuffer(data, dtype=broadcast.value.dtype).view_as(broadcast.value))
        broadcast.arrived = True
        self._arriving[source_rank].popleft()

    def close(self) -> None:
        """Wait for values in flight, and close the sockets."""
        for arriving in self._arriving.values():
            if arriving:
                arriving[-1].wait()
        for connection in self._sockets.values():
            connection.close()


class Broadcast:
    """One value in flight."""

    def __init__(self, broadcasts: Broadcasts, value: Tensor, source_rank: int) -> None:
        self.value = value
        self.arrived = False
        self._broadcasts = broadcasts
        self._source = source_rank

    def wait(self) -> None:
        """Wait until the value has arrived."""
        if not self.arrived:
            self._broadcasts.receive(self, self._source)

"""Small values that one rank gives to all others of its machine: a socket for each pair of ranks, and no thread.

The announcement of each step and its loss travel so. A broadcast of gloo would take several wake-ups of its threads.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

SHARES_IN_FLIGHT = 4
"""Values from one rank that may be on their way at once: two steps' losses and announcements. The next waits for the
first, so that what nobody reads does not pile up."""


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ConnectionError if the other end closes before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other rank closed its connection")
        data += more
    return data


class Shares:
    """One rank's side: `lines` has a connected socket for each other rank."""

    def __init__(self, rank: int, lines: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._lines = dict(lines)
        self._arriving: dict[int, deque[Share]] = {peer: deque() for peer in lines}

    def start(self, value: Tensor, source_rank: int) -> Share:
        """Starts to copy a contiguous float64 tensor on the CPU, in place, from one rank to all."""
        share = Share(self, value, source_rank)
        if source_rank == self._rank:
            share.here = True
            for line in self._lines.values():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a receiver may have ended already
                    line.sendall(value.numpy().tobytes())
            return share
        arriving = self._arriving[source_rank]
        while len(arriving) >= SHARES_IN_FLIGHT:
            self.receive(source_rank)
        arriving.append(share)
        return share

    def receive(self, source_rank: int) -> None:
        """Waits for the oldest value that is on its way from a rank: values of one rank arrive in order."""
        share = self._arriving[source_rank][0]
        data = bytearray(receive_exactly(self._lines[source_rank], share.value.numel() * share.value.itemsize))
        share.value.copy_(torch.frombuffer(data, dtype=share.value.dtype).view_as(share.value))
        share.here = True
        self._arriving[source_rank].popleft()

    def close(self) -> None:
        """Waits for what is on its way, and closes the sockets."""
        for source_rank, arriving in self._arriving.items():
            while arriving:
                self.receive(source_rank)
        for line in self._lines.values():
            line.close()


class Share:
    """One value on its way."""

    def __init__(self, shares: Shares, value: Tensor, source_rank: int) -> None:
        self.value = value
        self.here = False
        self._shares = shares
        self._source = source_rank

    def wait(self) -> None:
        """Returns when the value is here."""
        while not self.here:
            self._shares.receive(self._source)

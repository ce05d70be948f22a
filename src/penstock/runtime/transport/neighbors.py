"""The ranks of one machine: sockets between them, for channels that hand over their memory, and for small values that
one rank sends to all others.

These values are each step's announcement and loss: one socket per pair of ranks, and no threads. A gloo broadcast would
need several wake-ups of gloo's threads.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock._base.process import Process
from penstock.distributed.failure import notify
from penstock.runtime.transport.protocol import BROADCASTS_IN_FLIGHT

JOIN_SECONDS = 60.0
"""How long the ranks of one machine may take to connect with each other."""

KEY = struct.Struct("<5i")
"""What a channel hands its memory over with: number, source stage, target stage, backward, bytes of a slot."""

_HELLO = struct.Struct("<2i16s")  # rank, kind of connection, secret
_CREDENTIALS = struct.Struct("3i")  # process, user, group

Gather = Callable[[Any], list[Any]]
"""Gives every rank each rank's object; every rank calls it."""


class Neighbors:
    """Connections to the other ranks on this machine, over which channels hand over their memory.

    All ranks of a pipeline create them together. `ranks`: the ranks that can be reached.

    Every user of the machine sees the names of their sockets and can connect. So the kernel reports the process at the
    other end, and a rank shows the secret of the one that it connects to.
    """

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank = rank
        self._connections: dict[int, socket.socket] = {}
        self.lines: dict[int, socket.socket] = {}
        """A second socket to each neighbor, for `Broadcasts`."""
        self._arrived: dict[tuple[int, bytes], tuple[int, socket.socket]] = {}
        name, secret, this = f"\0penstock-{secrets.token_hex(16)}", secrets.token_bytes(16), Process.here()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.settimeout(JOIN_SECONDS)
            # An abstract name: visible in this network namespace only, and gone with the socket.
            listener.bind(name)
            listener.listen()
            gathered = gather((rank, (this.machine, this.pid, name, secret)))  # a barrier, too: now everyone listens
            endpoints = [endpoint for _, endpoint in sorted(gathered)]  # a mesh may have its processes in another order
            peers = [peer for peer, (machine, *_) in enumerate(endpoints) if machine == this.machine and peer != rank]
            pids = {
                this.pid,
                *(endpoints[peer][1] for peer in peers),
            }  # a sandbox may show this process instead
            kinds = (self._connections, self.lines)
            for peer in peers:
                for kind, sockets in enumerate(kinds if peer < rank else ()):
                    connection = sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    connection.connect(endpoints[peer][2])
                    if _peer_process(connection)[0] not in pids:
                        self.close()
                        raise ConnectionError(f"rank {peer} has ended, and another process has taken its socket's name")
                    connection.sendall(_HELLO.pack(rank, kind, endpoints[peer][3]))
            awaited = {(peer, kind) for peer in peers if peer > rank for kind in range(len(kinds))}
            strangers: set[int] = set()
            deadline = time.monotonic() + JOIN_SECONDS
            while awaited:
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                connection, _ = listener.accept()
                pid, user = _peer_process(connection)
                hello = _read_hello(connection, secret) if pid in pids and user == os.geteuid() else None
                if hello in awaited:
                    awaited.remove(hello)
                    kinds[hello[1]][hello[0]] = connection
                    continue
                connection.close()
                if user not in strangers:
                    strangers.add(user)
                    notify(
                        f"rank {rank} ignores connections from process {pid} of user {user}, which is none of its peers"
                    )

    @staticmethod
    def supported() -> bool:
        """Whether this system supports it (Linux does)."""
        return hasattr(os, "memfd_create") and hasattr(socket, "send_fds") and hasattr(socket, "SO_PEERCRED")

    @property
    def ranks(self) -> frozenset[int]:
        """The other ranks on this machine."""
        return frozenset(self._connections)

    def hand_over(self, peer: int, key: bytes, memory: int, signals: socket.socket) -> None:
        """Give a neighbor a channel's memory (a file descriptor) and socket."""
        socket.send_fds(self._connections[peer], [key], [memory, signals.fileno()])

    def take_over(self, peer: int, prefix: bytes) -> tuple[bytes, int, socket.socket]:
        """Wait for a neighbor's hand-over under a key that begins with `prefix`."""
        while True:
            for (sender, key), (memory, signals) in list(self._arrived.items()):
                if sender == peer and key.startswith(prefix):
                    del self._arrived[sender, key]
                    return key, memory, signals
            key, descriptors, _, _ = socket.recv_fds(self._connections[peer], KEY.size, 2)
            if len(key) < KEY.size or len(descriptors) < 2:
                raise ConnectionError(f"rank {peer} closed its connection")
            self._arrived[peer, key] = descriptors[0], socket.socket(fileno=descriptors[1])

    def close(self) -> None:
        """Close the connections."""
        for memory, signals in self._arrived.values():
            os.close(memory)
            signals.close()
        for connection in (*self._connections.values(), *self.lines.values()):
            connection.close()


def _peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the process that connected, or listens, and its user, as the kernel reports them."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def _read_hello(connection: socket.socket, secret: bytes) -> tuple[int, int] | None:
    """Return the rank that has connected and the kind of its connection; None without the secret."""
    connection.settimeout(JOIN_SECONDS)
    try:
        peer, kind, shown = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
    except OSError:
        return None
    connection.settimeout(None)
    return (peer, kind) if hmac.compare_digest(shown, secret) else None


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

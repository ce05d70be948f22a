"""A faster transport for CPU ranks on one machine: messages go through shared memory, wake-ups through a socket.

gloo needs several wake-ups of its own threads per message. Here the sender copies into memory that both processes map,
and four bytes wake the receiver. Reductions, and the first step, in which layouts are agreed on, go over gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._base.process import Process
from penstock._base.stages import Link
from penstock.distributed.broadcasts import Broadcasts, receive_exactly
from penstock.distributed.failure import notify
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.agreement import Agreement, Layouts
from penstock.runtime.transport.distributed import DistributedChannel, DistributedTransport
from penstock.runtime.transport.protocol import Channel, Combined, Message, Pending
from penstock.schedule.communication import BUFFERS_PER_LINK

SLOTS = BUFFERS_PER_LINK
"""How many messages of a channel fit in shared memory; the next one waits until the first has been taken out.

A lowered schedule keeps at most this many receives posted and unused, so a send waits no longer here than in the check,
where it waits until its receive is posted.
"""

JOIN_SECONDS = 60.0
"""How long the ranks of one machine may take to connect with each other."""

_ALIGN = 64
_KEY = struct.Struct("<5i")  # program, source stage, target stage, backward, bytes of a slot
_MESSAGE = struct.Struct("<i")  # microbatch
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
            key, descriptors, _, _ = socket.recv_fds(self._connections[peer], _KEY.size, 2)
            if len(key) < _KEY.size or len(descriptors) < 2:
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


class SharedMemoryTransport(Combined):
    """A `DistributedTransport` whose channels to ranks of this machine go through shared memory."""

    def __init__(self, inner: DistributedTransport, neighbors: Neighbors) -> None:
        super().__init__(inner.rank, inner.ranks, inner, inner)
        self._inner = inner
        self._neighbors = neighbors
        all_local = len(neighbors.ranks) == self.ranks - 1
        self._broadcasts = Broadcasts(self.rank, neighbors.lines) if all_local else None
        self._channels: dict[int, list[SharedMemoryChannel]] = {}

    def channel(self, program: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Channel:
        inner = self._inner.channel(program, link, source_rank, target_rank, backward=backward)
        peer = target_rank if source_rank == self.rank else source_rank
        if peer not in self._neighbors.ranks:
            return inner
        channel = SharedMemoryChannel(inner, self._neighbors, peer, (program, link, backward))
        self._channels.setdefault(program, []).append(channel)
        return channel

    def broadcast(self, value: Tensor, source_rank: int) -> Pending:
        return (self._broadcasts.start if self._broadcasts else super().broadcast)(value, source_rank)

    def release(self, program: int) -> None:
        super().release(program)
        for channel in self._channels.pop(program, ()):
            channel.close()

    def close(self) -> None:
        super().close()
        if self._broadcasts:
            self._broadcasts.close()
        for program in list(self._channels):
            self.release(program)
        self._neighbors.close()


class SharedMemoryChannel:
    """One link's messages to, or from, a rank of this machine."""

    def __init__(
        self,
        inner: DistributedChannel,
        neighbors: Neighbors,
        peer: int,
        key: tuple[int, Link, bool],
    ) -> None:
        self._inner = inner
        self._neighbors = neighbors
        self._peer = peer
        program, link, backward = key
        self._key = (program, link.source, link.target, int(backward))
        self._ring: _SlotRing | None = None
        self.agreement = inner.agreement

    def send(self, microbatch: int, message: Message) -> None:
        if self.agreement.learning:
            self._inner.send(microbatch, message)
            return
        self.agreement.check(microbatch, message)
        if self._ring is None:
            self._ring = self._open()
        self._ring.put(microbatch, message)

    def post(self, microbatch: int) -> None:
        """Post in the first step only: later messages wait in shared memory."""
        if self.agreement.learning:
            self._inner.post(microbatch)

    def receive(self, microbatch: int) -> list[Tensor | None]:
        if self.agreement.learning:
            return self._inner.receive(microbatch)
        if self._ring is None:
            prefix = _KEY.pack(*self._key, 0)[:-4]
            key, memory, signals = self._neighbors.take_over(self._peer, prefix)
            self._ring = _SlotRing(memory, signals, _KEY.unpack(key)[4], self.agreement, pinned=self._inner.pinned)
        return self._ring.take(microbatch)

    def _open(self) -> _SlotRing:
        """Set up shared memory, which the sender creates and hands over in the second step: a program that runs only
        once needs none."""
        size = max(_SlotRing.slot_bytes(layouts) for layouts in self.agreement.all())
        memory = os.memfd_create("penstock")
        os.ftruncate(memory, max(1, size) * SLOTS)
        local_end, remote_end = socket.socketpair()
        with remote_end, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a receiver may have closed
            self._neighbors.hand_over(self._peer, _KEY.pack(*self._key, size), memory, remote_end)
        return _SlotRing(memory, local_end, size, self.agreement)

    def close(self) -> None:
        """Give the memory back."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


@dataclass(frozen=True, slots=True)
class _SlotEntry:
    """Where a message's tensor is in a slot, in bytes. `plain`: its memory is copied as it is."""

    layout: Layout
    offset: int
    size: int
    plain: bool


class _SlotRing:
    """Slots of shared memory, used in turn, and the socket that signals which are full and which are free again.

    `memmove` copies the bytes: for a small message this costs less than two torch calls.
    """

    def __init__(
        self, memory: int, signals: socket.socket, size: int, agreement: Agreement, *, pinned: bool = False
    ) -> None:
        self._map = mmap.mmap(memory, max(1, size) * SLOTS)
        os.close(memory)
        self._start: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._start)
        self._signals = signals
        self._size = size
        self._agreement = agreement
        self._pinned = pinned
        self._empty: Callable[..., Tensor] = torch.empty_strided  # passing pin_memory takes longer
        if pinned:
            self._empty = partial(torch.empty_strided, pin_memory=True)
        self._entries: dict[int, list[_SlotEntry | None]] = {}
        self._turn = 0
        self._full = 0
        self._early: dict[int, list[Tensor | None]] = {}

    @staticmethod
    def slot_bytes(layouts: Layouts) -> int:
        """Return the size in bytes of a slot for a message."""
        return sum(_padded(exact.flat_bytes(layout)) for layout in layouts if layout is not None)

    def put(self, microbatch: int, message: Message) -> None:
        """Copy a message into the next slot; wait for one to become free."""
        while self._full == SLOTS:
            self._full -= len(self._receive(SLOTS))
        slot = self._next_slot()
        for entry, tensor in zip(self._entries_for(microbatch), message, strict=True):
            if entry is not None and tensor is not None:
                source = tensor if entry.plain else exact.pack(tensor)
                ctypes.memmove(slot + entry.offset, source.data_ptr(), entry.size)
        self._full += 1
        self._signals.sendall(_MESSAGE.pack(microbatch))

    def take(self, microbatch: int) -> list[Tensor | None]:
        """Wait for a message and copy it out."""
        while microbatch not in self._early:
            (arrived,) = _MESSAGE.unpack(self._receive(_MESSAGE.size))
            slot = self._next_slot()
            self._early[arrived] = [self._copy_out(slot, entry) for entry in self._entries_for(arrived)]
            try:  # noqa: SIM105  `contextlib.suppress` takes longer than the call
                self._signals.sendall(b"\0")
            except (BrokenPipeError, ConnectionResetError):
                pass  # a sender may end before its receiver
        return self._early.pop(microbatch)

    def close(self) -> None:
        """Give the memory back."""
        self._start = None
        self._signals.close()
        self._map.close()

    def _receive(self, max_bytes: int) -> bytes:
        data = self._signals.recv(max_bytes)
        if not data:
            raise ConnectionError("the other rank closed its connection")
        return data

    def _next_slot(self) -> int:
        """Return the address of the next slot."""
        turn, self._turn = self._turn, (self._turn + 1) % SLOTS
        return self._address + turn * self._size

    def _copy_out(self, slot: int, entry: _SlotEntry | None) -> Tensor | None:
        if entry is None:
            return None
        layout = entry.layout
        if entry.plain and not layout.misalignment:
            tensor = self._empty(layout.shape, layout.stride, dtype=layout.dtype)
            ctypes.memmove(tensor.data_ptr(), slot + entry.offset, entry.size)
            return tensor
        buffer = exact.allocate(layout, torch.device("cpu"), pinned=self._pinned)
        ctypes.memmove(buffer.flat.data_ptr(), slot + entry.offset, entry.size)
        return exact.unpack(buffer)

    def _entries_for(self, microbatch: int) -> list[_SlotEntry | None]:
        entries = self._entries.get(microbatch)
        if entries is None:
            entries, offset = [], 0
            for layout in self._agreement[microbatch]:
                if layout is None:
                    entries.append(None)
                    continue
                size = exact.flat_bytes(layout)
                entries.append(_SlotEntry(layout, offset, size, exact.is_dense(layout.shape, layout.stride)))
                offset += _padded(size)
            self._entries[microbatch] = entries
        return entries


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

"""A faster transport for CPU ranks on one machine: messages go through shared memory, wake-ups through a socket.

gloo needs several wake-ups of its own threads per message. Here the sender copies into memory that both processes map,
and four bytes wake the receiver. Reductions, and the first step, in which layouts are agreed on, go over gloo.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.distributed.groups import Groups
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.agreement import Agreement, Layouts
from penstock.runtime.transport.distributed import DistributedChannel, DistributedTransport
from penstock.runtime.transport.neighbors import KEY, Broadcasts, Neighbors
from penstock.runtime.transport.protocol import Message, Pending
from penstock.schedule.communication import BUFFERS_PER_LINK

SLOTS = BUFFERS_PER_LINK
"""How many messages of a channel fit in shared memory; the next one waits until the first has been taken out.

A lowered schedule keeps at most this many receives posted and unused, so a send waits no longer here than in the check,
where it waits until its receive is posted.
"""

_ALIGN = 64
_MESSAGE = struct.Struct("<i")  # microbatch


class SharedMemoryTransport(DistributedTransport):
    """One rank's side, whose channels to ranks of this machine go through shared memory."""

    def __init__(
        self, rank: int, groups: Groups, device: torch.device, neighbors: Neighbors, *, pinned: bool = False
    ) -> None:
        super().__init__(rank, groups, device, pinned=pinned)
        self._neighbors = neighbors
        all_local = len(neighbors.ranks) == self.ranks - 1
        self._small_values = Broadcasts(rank, neighbors.lines) if all_local else None

    def channel_to(self, peer: int, key: tuple[int, Link, bool]) -> Callable[..., DistributedChannel]:
        if peer not in self._neighbors.ranks:
            return DistributedChannel
        return partial(SharedMemoryChannel, self._neighbors, peer, key)

    def broadcast(self, value: Tensor, source_rank: int) -> Pending:
        return (self._small_values.start if self._small_values else super().broadcast)(value, source_rank)

    def close(self) -> None:
        super().close()
        if self._small_values:
            self._small_values.close()
        self._neighbors.close()


class SharedMemoryChannel(DistributedChannel):
    """One link's messages to, or from, a rank of this machine."""

    def __init__(self, neighbors: Neighbors, neighbor: int, key: tuple[int, Link, bool], *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._neighbors = neighbors
        self._neighbor = neighbor
        number, link, backward = key
        self._key = (number, link.source, link.target, int(backward))
        self._ring: _SlotRing | None = None

    def send(self, microbatch: int, message: Message) -> None:
        if self.agreement.learning:
            super().send(microbatch, message)
            return
        self.agreement.check(microbatch, message)
        if self._ring is None:
            self._ring = self._open()
        self._ring.put(microbatch, message)

    def post(self, microbatch: int) -> None:
        """Post in the first step only: later messages wait in shared memory."""
        if self.agreement.learning:
            super().post(microbatch)

    def receive(self, microbatch: int) -> list[Tensor | None]:
        if self.agreement.learning:
            return super().receive(microbatch)
        if self._ring is None:
            prefix = KEY.pack(*self._key, 0)[:-4]
            key, memory, signals = self._neighbors.take_over(self._neighbor, prefix)
            self._ring = _SlotRing(memory, signals, KEY.unpack(key)[4], self.agreement, pinned=self.pinned)
        return self._ring.take(microbatch)

    def _open(self) -> _SlotRing:
        """Set up shared memory, which the sender creates and hands over in the second step: a schedule that runs only
        once needs none."""
        size = max(_SlotRing.slot_bytes(layouts) for layouts in self.agreement.all())
        memory = os.memfd_create("penstock")
        os.ftruncate(memory, max(1, size) * SLOTS)
        local_end, remote_end = socket.socketpair()
        with remote_end, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a receiver may have closed
            self._neighbors.hand_over(self._neighbor, KEY.pack(*self._key, size), memory, remote_end)
        return _SlotRing(memory, local_end, size, self.agreement)

    def close(self) -> None:
        super().close()
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

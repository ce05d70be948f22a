"""Start trials at the same moment on all hosts: hosts report to host 0, which announces when the next trial begins.

This takes two messages per host and trial. A barrier and a gather from the backend would take many, and waste processor
and network time on work that is not measured. Hosts of one machine read host 0's announcements from shared memory
(`StartBoard`). Between machines, announcements travel over the network, so the start is set far enough ahead that
nearly all recent announcements would have arrived in time. The samples show how far apart the hosts actually started.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.errors import FabricError
from penstock._base.process import lives
from penstock.network.fabric.emulation.joining import Members, wait_for

_FIRST_NS = 2_000_000
"""The time allowed for the first announcement to arrive; later ones get what recent ones took, plus a margin."""
_WORDS, _IN_TIME = 100, 0.95
"""How many recent announcements count, and the fraction of them that must have reached all hosts in time."""

_MARGIN_NS = 150_000


BOARD = "PENSTOCK_START_BOARD"
"""The environment variable that names the file, which is empty at first."""

_NUMBERS = 5
_LOOK_SECONDS, _LIFE_SECONDS = 1e-4, 0.1


class StartBoard:
    """One host's view of memory in which host 0 announces when a trial begins, if all hosts are on one machine.

    An announcement over the network under test would be delayed or lost like any other message, and hosts would start
    at different moments. Waiting hosts poll the memory several thousand times per second.

    Args:
        path: the file.
        writes: True on host 0.
        stall_seconds: how long to wait for an announcement before giving up.
    """

    def __init__(self, path: str, *, writes: bool, stall_seconds: float) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, 8 * _NUMBERS)
            self._numbers = memoryview(mmap.mmap(descriptor, 8 * _NUMBERS)).cast("q")
        finally:
            os.close(descriptor)
        self._seen = 0
        self._stall_seconds = stall_seconds
        if writes:
            self._numbers[4] = os.getpid()

    def announce(self, sent_ns: int, due_ns: int, flags: int) -> None:
        """Announces a trial. Called on host 0, once every host has heard the previous announcement."""
        self._seen += 1
        self._numbers[1], self._numbers[2], self._numbers[3] = sent_ns, due_ns, flags
        self._numbers[0] = self._seen  # last, because readers poll it

    def wait(self) -> tuple[int, int, int]:
        """Waits for the next announcement, and returns what `announce` was given. Called on the other hosts. Raises
        FabricError: host 0 has ended, or made no announcement in time."""
        began = looked = time.monotonic()
        while self._numbers[0] == self._seen:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - looked > _LIFE_SECONDS:
                looked = now
                if self._numbers[4] and not lives(self._numbers[4]):
                    raise FabricError("host 0 has ended")
                if now - began > self._stall_seconds:
                    raise FabricError(f"host 0 has not answered for {self._stall_seconds:g} s")
        self._seen += 1
        return self._numbers[1], self._numbers[2], self._numbers[3]


class Word(NamedTuple):
    """Host 0's announcement to all hosts: when the next trial begins, on this host's clock, and what else to do."""

    due_ns: int
    flags: int


class Signals:
    """One host's side of the signaling; all hosts make the same calls."""

    def __init__(self, members: Members, board: StartBoard | None = None) -> None:
        """Creates this host's side. `board`: what all hosts share; if None, announcements go over the network."""
        self._members = members
        self._board = board
        self._others = range(1, members.size) if members.rank == 0 else ()
        self._heard_after_ns: deque[int] = deque([_FIRST_NS], maxlen=_WORDS)
        """How long recent announcements took to reach this host; on host 0, to reach the last host."""

    def report(self, stamps: Tensor) -> Tensor:
        """Sends stamps to host 0, which gets every host's, one row per host; other hosts get their own row only."""
        mine = torch.cat([torch.tensor([self._heard_after_ns[-1]]), stamps.flatten()])
        group = self._members.control
        if self._members.rank != 0:
            dist.send(mine, 0, group=group)
            return stamps.unsqueeze(0)
        everyone = torch.empty(self._members.size, len(mine), dtype=torch.int64)
        everyone[0] = mine
        wait_for([dist.irecv(everyone[host], host, group=group) for host in self._others])
        self._heard_after_ns.append(int(everyone[1:, 0].max()))
        return everyone[:, 1:].view(-1, *stamps.shape)

    def word(self, flags: int, offset_ns: int) -> Word:
        """Returns host 0's announcement, with host 0's flags, on every host; `offset_ns` is what to add to this host's
        clock to get host 0's."""
        group = self._members.control
        if self._members.rank != 0:
            if self._board is not None:
                sent_ns, due_ns, flags = self._board.wait()
            else:
                dist.recv(heard := torch.zeros(3, dtype=torch.int64), 0, group=group)
                sent_ns, due_ns, flags = heard.tolist()
            self._heard_after_ns.append(max(time.monotonic_ns() + offset_ns - sent_ns, 0))
            return Word(due_ns - offset_ns, flags)
        sent_ns = time.monotonic_ns()
        due_ns = sent_ns + enough(self._heard_after_ns) + _MARGIN_NS
        if self._board is not None:
            self._board.announce(sent_ns, due_ns, flags)
            return Word(due_ns, flags)
        said = torch.tensor([sent_ns, due_ns, flags])
        wait_for([dist.isend(said, host, group=group) for host in self._others])
        return Word(due_ns, flags)


def enough(heard_after_ns: Sequence[int]) -> int:
    """Returns the nanoseconds in which nearly all announcements reached all hosts; the minimum is usually too short."""
    return sorted(heard_after_ns)[math.ceil(_IN_TIME * len(heard_after_ns)) - 1]

"""Shared memory in which host 0 announces when a trial begins, if all hosts are on one machine.

An announcement over the network under test would be delayed or lost like any other message, and hosts would start at
different moments. Waiting hosts poll the memory several thousand times per second.
"""

from __future__ import annotations

import mmap
import os
import time

from penstock._base.process import lives
from penstock.errors import FabricError

VARIABLE = "PENSTOCK_START_BOARD"
"""The environment variable that names the file, which is empty at first."""

_NUMBERS = 5
_LOOK_SECONDS, _LIFE_SECONDS = 1e-4, 0.1


class StartBoard:
    """One host's view of the board.

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
        """Waits for the next announcement, and returns what `announce` was given. Called on the other hosts.

        Raises:
            FabricError: host 0 has ended, or made no announcement in time.
        """
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

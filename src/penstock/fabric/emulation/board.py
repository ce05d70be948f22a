"""Where host 0 says when a trial begins, if all hosts are of one machine: a few numbers of memory that they share.

A word that went over the network under test would be delayed and lost as that network has it, and hosts would begin at
different moments. Hosts look for it some thousand times a second while they wait.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Self

from penstock.errors import FabricError

VARIABLE = "PENSTOCK_START_BOARD"
"""Of the environment: the file, which is empty at first."""

_NUMBERS = 5
_LOOK_SECONDS, _LIFE_SECONDS = 1e-4, 0.1


class Board:
    """One host's view of it.

    Args:
        path: of the file.
        writes: this is host 0.
        stall_seconds: after which a word is waited for no longer.
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

    @classmethod
    def of_environment(cls, rank: int, stall_seconds: float) -> Self | None:
        """Where whoever started the hosts has made one; None elsewhere."""
        path = os.environ.get(VARIABLE)
        return cls(path, writes=rank == 0, stall_seconds=stall_seconds) if path else None

    def say(self, sent_ns: int, due_ns: int, flags: int) -> None:
        """By host 0, once every host has heard the word before."""
        self._seen += 1
        self._numbers[1], self._numbers[2], self._numbers[3] = sent_ns, due_ns, flags
        self._numbers[0] = self._seen  # last: it is looked at first

    def hear(self) -> tuple[int, int, int]:
        """The next word, by the others: what `say` was given.

        Raises:
            FabricError: host 0 has ended, or says nothing in time.
        """
        began = looked = time.monotonic()
        while self._numbers[0] == self._seen:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            if now - looked > _LIFE_SECONDS:
                looked = now
                if self._numbers[4] and not _lives(self._numbers[4]):
                    raise FabricError("host 0 has ended")
                if now - began > self._stall_seconds:
                    raise FabricError(f"host 0 has said nothing for {self._stall_seconds:g} s")
        self._seen += 1
        return self._numbers[1], self._numbers[2], self._numbers[3]


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

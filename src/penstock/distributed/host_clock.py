"""The clock on which the times of all ranks are compared: that of rank 0's host.

As in NTP (RFC 5905), a rank on another host asks for the time there. Of the latest exchanges the one with the shortest
round trip counts, and half of that bounds the error. Exchanges go with the watchdog's beats, so no step waits for them.
"""

from __future__ import annotations

import os
import time
from collections import deque

from penstock._base.process import kernel

now_ns = time.perf_counter_ns

KEPT = 16
"""How many exchanges count: with one a beat, those of eight seconds, since clocks drift apart."""
FEWEST = 8
"""How many follow each other without waiting for a beat, at the start."""


def clock_name() -> str:
    """Return what distinguishes this process's clock: the running kernel and its time namespace; empty if unknown."""
    try:
        return f"{kernel()} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # older than Linux 5.6: all processes have one clock
        return kernel()


class HostOffset:
    """What to add to this host's clock to get that of rank 0's host.

    Args:
        other: the name of rank 0's clock.
    """

    def __init__(self, other: str) -> None:
        self._shared = clock_name() == other != ""
        self._trips: deque[tuple[int, int]] = deque(maxlen=KEPT)

    @property
    def nanoseconds(self) -> int:
        """0 if both are one clock, or before the first exchange."""
        return min(self._trips)[1] if self._trips else 0

    @property
    def error_ns(self) -> int:
        """By how much `nanoseconds` may be wrong."""
        return min(self._trips)[0] // 2 if self._trips else 0

    @property
    def wants_more(self) -> bool:
        """Whether to ask again at once."""
        return not self._shared and len(self._trips) < FEWEST

    def note(self, asked: int, there: int) -> None:
        """Take the answer to a question that was asked at `asked` by this clock: the time there."""
        answered = now_ns()
        if not self._shared:
            self._trips.append((answered - asked, there - (asked + answered) // 2))

"""The clock on which the times of all ranks are compared: that of rank 0's host.

As in NTP (RFC 5905), a rank on another host requests the time there. The latest exchange with the shortest round trip
counts, and half of that trip bounds the error. Exchanges go with the watchdog's beats, so no step waits for them.
"""

from __future__ import annotations

import os
import time
from collections import deque

from penstock._base.process import kernel

now_ns = time.perf_counter_ns

MAX_EXCHANGES = 16
"""How many exchanges count: with one per beat, those of eight seconds, since clocks drift apart."""
INITIAL_EXCHANGES = 8
"""How many follow each other at the start, without waiting for a beat."""


def clock_name() -> str:
    """Return what distinguishes this process's clock: the running kernel and its time namespace; empty if unknown."""
    try:
        return f"{kernel()} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # older than Linux 5.6: all processes have one clock
        return kernel()


class HostOffset:
    """What to add to this host's clock to get that of rank 0's host.

    Args:
        remote_name: the name of rank 0's clock.
    """

    def __init__(self, remote_name: str) -> None:
        self._shared = clock_name() == remote_name != ""
        self._exchanges: deque[tuple[int, int]] = deque(maxlen=MAX_EXCHANGES)

    @property
    def nanoseconds(self) -> int:
        """0 if both are one clock, or before the first exchange."""
        return min(self._exchanges)[1] if self._exchanges else 0

    @property
    def error_ns(self) -> int:
        """By how much `nanoseconds` may be wrong."""
        return min(self._exchanges)[0] // 2 if self._exchanges else 0

    @property
    def needs_more(self) -> bool:
        """Whether to start the next exchange at once."""
        return not self._shared and len(self._exchanges) < INITIAL_EXCHANGES

    def add_exchange(self, asked_ns: int, remote_ns: int) -> None:
        """Add an exchange: the request was sent at `asked_ns` by this clock, and answered with the time there."""
        answered_ns = now_ns()
        if not self._shared:
            self._exchanges.append((answered_ns - asked_ns, remote_ns - (asked_ns + answered_ns) // 2))

"""Offsets between the clocks of hosts, from exchanges of messages: what makes one-way delays mean something.

As NTP has it (RFC 5905): of many exchanges the one with the shortest round trip counts; half of that bounds the error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

FEWEST_EXCHANGES, MOST_EXCHANGES = 8, 40
EXCHANGE_SECONDS = 0.2
"""After which no other exchange with a host is begun, if there were the fewest: far hosts do not hold up the run."""
DRIFT = 50e-6
"""By how much of the time that goes by a clock may go wrong against another: what quartz is good for."""
CLOCK_SECONDS = 20.0
"""How often the offsets of clocks that differ are estimated anew."""

_ENOUGH = -1
"""Sent instead of a stamp: no more exchanges."""


@dataclass(frozen=True, slots=True)
class Offset:
    """What is added to a host's clock to get rank 0's.

    Attributes:
        offset_ns: zero where both read the same kernel's clock.
        uncertainty_ns: the largest error that is possible until the next estimate, drift included.
        estimated_ns: what the exchange of messages has shown; zero if none was needed.
        shared: whether both read the same clock.
    """

    offset_ns: int
    uncertainty_ns: int
    estimated_ns: int
    shared: bool


def estimate(group: dist.ProcessGroup | None = None) -> Offset:
    """This host's offset. A collective: every rank calls it; they are served one after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    boots = _kernels(group)
    best = Offset(0, 0, 0, True)
    for other in range(1, size):
        if boots[other] == boots[0] != "":
            continue  # one clock
        if rank == 0:
            _serve(other)
        elif rank == other:
            best = _ask()
    return best


def is_one(group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks read the same clock. A collective."""
    kernels = set(_kernels(group))
    return len(kernels) == 1 and "" not in kernels


def _kernels(group: dist.ProcessGroup | None) -> list[str]:
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, kernel(), group=group)
    return found


def kernel() -> str:
    """What names the running kernel of this host, and so its clock; empty if there is no telling."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _serve(other: int) -> None:
    stamp = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(stamp, other)
        if stamp[0] == _ENOUGH:
            return
        stamp[0] = time.monotonic_ns()
        dist.send(stamp, other)


def _ask() -> Offset:
    stamp = torch.zeros(1, dtype=torch.int64)
    trips: list[tuple[int, int]] = []
    began = time.monotonic_ns()
    while len(trips) < FEWEST_EXCHANGES or (
        len(trips) < MOST_EXCHANGES and time.monotonic_ns() - began < EXCHANGE_SECONDS * 1e9
    ):
        start = time.monotonic_ns()
        stamp[0] = 0
        dist.send(stamp, 0)
        dist.recv(stamp, 0)
        end = time.monotonic_ns()
        trips.append((end - start, int(stamp[0]) - (start + end) // 2))
    stamp[0] = _ENOUGH
    dist.send(stamp, 0)
    trip, offset = min(trips)
    return Offset(offset, trip // 2 + int(DRIFT * CLOCK_SECONDS * 1e9), offset, False)

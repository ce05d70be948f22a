"""Offsets between the clocks of hosts, from exchanges of messages: what makes one-way delays mean something.

As NTP has it (RFC 5905): of many exchanges the one with the shortest round trip counts; half of that bounds the error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

EXCHANGES = 40


@dataclass(frozen=True, slots=True)
class Offset:
    """What is added to a host's clock to get rank 0's.

    Attributes:
        offset_ns: zero where both read the same kernel's clock.
        uncertainty_ns: the largest error that is possible.
        estimated_ns: what the exchange of messages has shown.
        shared: whether both read the same clock.
    """

    offset_ns: int
    uncertainty_ns: int
    estimated_ns: int
    shared: bool


def estimate(group: dist.ProcessGroup | None = None) -> Offset:
    """This host's offset. A collective: every rank calls it; they are served one after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    boots: list[str] = [""] * size
    dist.all_gather_object(boots, kernel(), group=group)
    best = Offset(0, 0, 0, True)
    for other in range(1, size):
        if rank == 0:
            _serve(other)
        elif rank == other:
            best = _ask(boots[rank] == boots[0] != "")
    return best


def kernel() -> str:
    """What names the running kernel of this host, and so its clock; empty if there is no telling."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _serve(other: int) -> None:
    stamp = torch.zeros(1, dtype=torch.int64)
    for _ in range(EXCHANGES):
        dist.recv(stamp, other)
        stamp[0] = time.monotonic_ns()
        dist.send(stamp, other)


def _ask(shared: bool) -> Offset:
    stamp = torch.zeros(1, dtype=torch.int64)
    trips = []
    for _ in range(EXCHANGES):
        start = time.monotonic_ns()
        dist.send(stamp, 0)
        dist.recv(stamp, 0)
        end = time.monotonic_ns()
        trips.append((end - start, int(stamp[0]) - (start + end) // 2))
    trip, offset = min(trips)
    return Offset(0, 0, offset, True) if shared else Offset(offset, trip // 2, offset, False)

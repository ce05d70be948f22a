"""Estimate the offsets between hosts' clocks from message exchanges, so that one-way delays are meaningful.

As in NTP (RFC 5905), the exchange with the shortest round trip counts, and half of that round trip bounds the error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock._base.process import kernel

FEWEST_EXCHANGES, MAX_EXCHANGES = 8, 40
EXCHANGE_SECONDS = 0.2
"""After this time, only the minimum of exchanges with a host is made, so that distant hosts do not delay the run."""
DRIFT = 50e-6
"""How fast a clock may drift against another, as a fraction of the elapsed time; quartz is this good."""
CLOCK_SECONDS = 20.0
"""The interval at which the offsets of separate clocks are estimated again."""

_ENOUGH = -1
"""Sent in place of a timestamp to end the exchanges."""


@dataclass(frozen=True, slots=True)
class Offset:
    """What to add to a host's clock to get rank 0's.

    Attributes:
        offset_ns: zero if both hosts read the same kernel's clock.
        uncertainty_ns: the largest possible error until the next estimate, including drift.
    """

    offset_ns: int
    uncertainty_ns: int


def estimate(group: dist.ProcessGroup | None = None) -> Offset:
    """Estimates this host's offset. Collective: every rank calls it, and rank 0 serves them one after the other."""
    rank, boots, best = dist.get_rank(), _kernels(group), Offset(0, 0)
    for other in range(1, len(boots)):
        if boots[other] == boots[0] != "":
            continue  # both read the same clock
        if rank == 0:
            stamp = torch.zeros(1, dtype=torch.int64)
            while True:
                dist.recv(stamp, other)
                if stamp[0] == _ENOUGH:
                    break
                stamp[0] = time.monotonic_ns()
                dist.send(stamp, other)
        elif rank == other:
            best = _ask()
    return best


def is_one(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks read the same clock. Collective."""
    kernels = set(_kernels(group))
    return len(kernels) == 1 and "" not in kernels


def _kernels(group: dist.ProcessGroup | None) -> list[str]:
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, kernel(), group=group)
    return found


def _ask() -> Offset:
    stamp = torch.zeros(1, dtype=torch.int64)
    trips: list[tuple[int, int]] = []
    end_ns = time.monotonic_ns() + int(EXCHANGE_SECONDS * 1e9)
    while len(trips) < FEWEST_EXCHANGES or (len(trips) < MAX_EXCHANGES and time.monotonic_ns() < end_ns):
        start = time.monotonic_ns()
        dist.send(torch.zeros_like(stamp), 0)
        dist.recv(stamp, 0)
        end = time.monotonic_ns()
        trips.append((end - start, int(stamp[0]) - (start + end) // 2))
    dist.send(torch.full_like(stamp, _ENOUGH), 0)
    trip, offset = min(trips)
    return Offset(offset, trip // 2 + int(DRIFT * CLOCK_SECONDS * 1e9))

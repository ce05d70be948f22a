"""Estimate the offsets between hosts' clocks from message exchanges, so that one-way delays are meaningful."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.distributed import host_clock

DRIFT = 50e-6
"""How fast a clock may drift against another, as a fraction of the elapsed time; quartz is this good."""
CLOCK_SECONDS = 20.0
"""The interval at which the offsets of separate clocks are estimated again."""


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
    """Estimate this host's offset. Collective: every rank calls it, and rank 0 serves them one after the other."""
    rank, clocks, offset = dist.get_rank(), _clocks(group), Offset(0, 0)
    stamp = torch.zeros(1, dtype=torch.int64)
    for peer in range(1, len(clocks)):
        if clocks[peer] == clocks[0] != "":
            continue  # both read the same clock
        if rank == 0:
            for _ in range(host_clock.INITIAL_EXCHANGES):
                dist.recv(stamp, peer)
                stamp[0] = host_clock.now_ns()
                dist.send(stamp, peer)
        elif rank == peer:
            estimator = host_clock.HostOffset(clocks[0])
            while estimator.needs_more:
                sent_ns = host_clock.now_ns()
                dist.send(stamp, 0)
                dist.recv(stamp, 0)
                estimator.add_exchange(sent_ns, int(stamp[0]))
            offset = Offset(estimator.nanoseconds, estimator.error_ns + int(DRIFT * CLOCK_SECONDS * 1e9))
    return offset


def is_shared(group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks read the same clock. Collective."""
    clocks = set(_clocks(group))
    return len(clocks) == 1 and "" not in clocks


def _clocks(group: dist.ProcessGroup | None) -> list[str]:
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, host_clock.clock_name(), group=group)
    return names

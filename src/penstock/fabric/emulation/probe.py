"""What the links between neighbours can do, before the trials: half of the round trip of messages of growing size.

The shortest of several trips counts. Whatever else goes on only adds to it, and what is ideal is measured against it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from penstock.fabric.emulation.wires import Message, Wire

SIZES = (64, 4096, 16384, 65536, 262144, 1048576)
TRIPS = 15
BUDGET_SECONDS = 2.0
"""Of one pair: a slow link is measured with fewer large messages."""


def neighbours(hosts: int) -> tuple[tuple[int, int], ...]:
    """The pairs that are measured: those of a ring."""
    return tuple((rank, (rank + 1) % hosts) for rank in range(hosts if hosts > 2 else 1))


def measure(pair: tuple[int, int], wire: Wire) -> list[tuple[int, float]]:
    """Bytes and seconds one way, on the first of the pair; empty on others. Both of the pair call it."""
    rank = dist.get_rank()
    if rank not in pair:
        return []
    first, found, began = rank == pair[0], [], time.monotonic()
    for size in SIZES:
        other = pair[1] if first else pair[0]
        buffer = torch.zeros(size // 4)
        goes_on = torch.zeros(1)
        seconds = []
        for _ in range(TRIPS):
            start = time.monotonic()
            for turn in (True, False):
                message = [Message(buffer, other)]
                if turn == first:
                    wire.exchange(message, [])
                else:
                    wire.exchange([], message)
            seconds.append((time.monotonic() - start) / 2)
            # The first decides for both.
            goes_on[0] = size < SIZES[1] or time.monotonic() - began < BUDGET_SECONDS
            if first:
                dist.send(goes_on, other)
            else:
                dist.recv(goes_on, other)
            if not goes_on[0]:
                break
        if first:
            found.append((size, min(seconds)))
        if not goes_on[0]:
            break
    return found

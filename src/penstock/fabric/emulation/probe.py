"""What the links between neighbours can do, before the trials: half of the round trip of messages of growing size.

The shortest of several trips counts. Whatever else goes on only adds to it, and what is ideal is measured against it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from penstock.fabric.emulation.wires import Message, Wire

SIZES = (64, 4096, 16384, 65536, 262144, 1048576)
TRIPS, FEWEST_TRIPS = 15, 4
SIZE_SECONDS = 0.35
"""After which no more trips of a size are begun, if there are the fewest: a TCP's first find its window closed."""
BUDGET_SECONDS = 12.0
"""Of one pair, after which no larger size is begun."""


def neighbours(hosts: int) -> tuple[tuple[int, int], ...]:
    """The pairs that are measured: those of a ring."""
    return tuple((rank, (rank + 1) % hosts) for rank in range(hosts if hosts > 2 else 1))


def measure(pair: tuple[int, int], wire: Wire) -> list[tuple[int, float]]:
    """Bytes and seconds one way, on the first of the pair; empty on others. Both of the pair call it."""
    rank = dist.get_rank()
    if rank not in pair:
        return []
    first, found, began = rank == pair[0], [], time.monotonic()
    other = pair[1] if first else pair[0]
    for size in SIZES:
        buffer = torch.zeros(size // 4)
        seconds: list[float] = []
        begun = time.monotonic()
        while True:
            start = time.monotonic()
            for turn in (True, False):
                message = [Message(buffer, other)]
                if turn == first:
                    wire.exchange(message, [])
                else:
                    wire.exchange([], message)
            seconds.append((time.monotonic() - start) / 2)
            enough = len(seconds) >= FEWEST_TRIPS and time.monotonic() - begun > SIZE_SECONDS
            if not _agreed(len(seconds) < TRIPS and not enough, other, decides=first):
                break
        if first:
            found.append((size, min(seconds)))
        if not _agreed(time.monotonic() - began < BUDGET_SECONDS, other, decides=first):
            break
    return found


def _agreed(goes_on: bool, other: int, *, decides: bool) -> bool:
    """What the one that decides says, on both."""
    word = torch.tensor([float(goes_on)])
    if decides:
        dist.send(word, other)
    else:
        dist.recv(word, other)
    return bool(word[0])

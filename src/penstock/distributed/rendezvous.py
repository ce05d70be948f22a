"""Joins the processes that torchrun started, including those that it restarted."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.distributed.failure_detector import Patience
from penstock.distributed.joining import Meeting, Missing, attempt
from penstock.errors import ArgumentError

_URL = "env://?world_size=-1"
"""The store of the environment's variables, which then does not wait for all ranks: those that come say who is missing
(`joining.Meeting`)."""
_REMEDY = "start all ranks with torchrun or penstock run, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"


def number_of(name: str, least: int, most: int = 1 << 31, remedy: str = _REMEDY) -> int:
    """A number of the environment that torchrun sets. Raises ArgumentError if it is missing or impossible."""
    given = os.environ.get(name, "")[:80]
    if not (given.isdecimal() and len(given) < 20 and least <= int(given) <= most):
        sizes = f"WORLD_SIZE={os.environ.get('WORLD_SIZE', '')[:80]!r}"
        raise ArgumentError(
            f"{name}={given!r} in the environment, with {sizes}: expected an integer from {least} to {most}; {remedy}"
        )
    return int(given)


def start(backend: str) -> None:
    """Calls `init_process_group`, with nothing left from an earlier attempt."""
    ranks = number_of("WORLD_SIZE", 1)
    rank = number_of("RANK", 0, ranks - 1)
    with Missing(rank, ranks, Patience()) as missing:
        missing.address = os.environ.get("MASTER_ADDR", ""), number_of("MASTER_PORT", 1, 65535)
        store, *_ = next(rendezvous(_URL))  # without torchrun, rank 0 opens it
        missing.reached = True
        place = dist.PrefixStore(attempt() or "default_pg", store)  # type: ignore[attr-defined]  # public, though not re-exported
        Meeting(place, rank, ranks).await_all(missing)  # torch may wait for them silently
        missing.ranks = ()
        dist.init_process_group(backend, store=place, rank=rank, world_size=ranks)

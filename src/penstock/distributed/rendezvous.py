"""Joins the processes that torchrun started, including those that it restarted."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock._base.errors import ArgumentError
from penstock.distributed.failure_detector import Patience
from penstock.distributed.joining import Meeting, Missing, attempt

_URL = "env://?world_size=-1"
"""The store of the environment's variables, which then does not wait for all ranks: those that come say who is missing
(`joining.Meeting`)."""
_REMEDY = "start all ranks with torchrun or penstock run, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each"

USUAL = Patience()


def number_of(name: str, least: int, most: int = 1 << 31, remedy: str = _REMEDY) -> int:
    """A number of the environment that torchrun sets. Raises ArgumentError if it is missing or impossible."""
    given = os.environ.get(name, "")[:80]
    if not (given.isdecimal() and len(given) < 20 and least <= int(given) <= most):
        sizes = f"WORLD_SIZE={os.environ.get('WORLD_SIZE', '')[:80]!r}"
        raise ArgumentError(
            f"{name}={given!r} in the environment, with {sizes}: expected an integer from {least} to {most}; {remedy}"
        )
    return int(given)


def start(
    backend: str, patience: Patience = USUAL, caller: str = "penstock.pipeline", seconds: float | None = None
) -> Any:
    """Calls `init_process_group`, with nothing left from an earlier attempt. Returns the store at which the ranks met.

    Args:
        patience: how long to wait for the other ranks.
        caller: what each rank has to call, for messages.
        seconds: how long an operation of the default group may take; None: torch's own limit.
    """
    ranks = number_of("WORLD_SIZE", 1)
    rank = number_of("RANK", 0, ranks - 1)
    with Missing(rank, ranks, patience, caller) as missing:
        missing.address = os.environ.get("MASTER_ADDR", ""), number_of("MASTER_PORT", 1, 65535)
        limit = timedelta(seconds=patience.join_seconds)
        store, *_ = next(rendezvous(_URL, timeout=limit))  # without torchrun, rank 0 opens it
        missing.reached = True
        place = dist.PrefixStore(attempt() or "default_pg", store)  # type: ignore[attr-defined]  # public, though not re-exported
        Meeting(place, rank, ranks).await_all(missing)  # torch may wait for them silently
        missing.ranks = ()
        timeout = None if seconds is None else timedelta(seconds=seconds)
        dist.init_process_group(backend, store=place, rank=rank, world_size=ranks, timeout=timeout)
    return place

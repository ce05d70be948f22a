"""Joins the processes that torchrun started, including those that it restarted."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.runtime.processes.failure_detector import Patience
from penstock.runtime.processes.joining import Meeting, Missing, attempt

_URL = "env://?world_size=-1"
"""The store of the environment's variables, which then does not wait for all ranks: those that come say who is missing
(`joining.Meeting`)."""


def start(backend: str) -> None:
    """Calls `init_process_group`, with nothing left from an earlier attempt."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    with Missing(rank, ranks, Patience()) as missing:
        store, *_ = next(rendezvous(_URL))  # without torchrun, rank 0 opens it
        place = dist.PrefixStore(attempt() or "default_pg", store)  # type: ignore[attr-defined]  # public, though not re-exported
        Meeting(place, rank, ranks).await_all(missing)  # torch may wait for them silently
        missing.ranks = ()
        dist.init_process_group(backend, store=place, rank=rank, world_size=ranks)

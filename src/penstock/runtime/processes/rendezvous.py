"""Joins the processes that torchrun started, including those that it restarted.

torchrun (since 2.4) gives one store to all attempts of a job. Processes of the next attempt read what earlier ones
wrote there (the addresses at which gloo listened), and are then refused or wait forever. So each attempt gets its own
prefix.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.runtime.processes.board import Patience
from penstock.runtime.processes.joining import Meeting, Missing

_URL = "env://?world_size=-1"
"""The store of the environment's variables, which then does not wait for all ranks: those that come say who is missing
(`joining.Meeting`)."""


def start(backend: str) -> None:
    """Calls `init_process_group`, with nothing left from an earlier attempt.

    Several agents (nodes) count attempts differently, so only torchrun could tell the attempts apart: in that case
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes each attempt create its own store.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    one_agent = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    name = f"attempt {attempt}" if attempt and one_agent else "default_pg"
    with Missing(rank, ranks, Patience()) as missing:
        store, *_ = next(rendezvous(_URL))  # without torchrun, rank 0 opens it
        place = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # public, though not re-exported
        Meeting(place, rank, ranks).await_all(missing)  # torch may wait for them silently
        missing.ranks = ()
        dist.init_process_group(backend, store=place, rank=rank, world_size=ranks)

"""Joins the processes that torchrun started, including those that it restarted.

torchrun (since 2.4) gives one store to all attempts of a job. Processes of the next attempt read what earlier ones
wrote there (the addresses at which gloo listened), and are then refused or wait forever. So each attempt gets its own
prefix.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def start(backend: str) -> None:
    """Calls `init_process_group`, with nothing left from an earlier attempt.

    Several agents (nodes) count attempts differently, so only torchrun could tell the attempts apart: in that case
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes each attempt create its own store.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    one_agent = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if attempt == 0 or not one_agent:
        dist.init_process_group(backend)
        return
    store, rank, ranks = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]  # public, though not re-exported
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)

"""Joins the processes that torchrun started, also those that it starts again.

torchrun (since 2.4) hands one store to all attempts of a job. What processes that are gone have written there (the
addresses at which gloo listened) is read by those of the next attempt, which then are refused or wait for ever. So each
attempt gets a prefix of its own.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def start(backend: str) -> None:
    """`init_process_group`, with nothing left of an earlier attempt.

    With several agents (nodes) their counts of attempts differ, so that only torchrun could tell the attempts apart:
    there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has each attempt make a store of its own.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    one_agent = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if attempt == 0 or not one_agent:
        dist.init_process_group(backend)
        return
    store, rank, ranks = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]  # public, though not re-exported
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)

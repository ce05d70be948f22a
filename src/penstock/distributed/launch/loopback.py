"""torchrun's rendezvous for one machine, on loopback: with `--standalone`, torch's store listens everywhere.

The store has no authentication, so whoever reaches it can read and change what the ranks agree on.
"""

from __future__ import annotations

import os
import socket
import uuid
from argparse import Namespace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_HOST, _BACKEND = "127.0.0.1", "penstock-loopback"


class LoopbackRendezvous(StaticTCPRendezvous):
    """An agent that is alone, and the store of its ranks."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server((_HOST, 0), backlog=512)
        port = listener.getsockname()[1]
        super().__init__(_HOST, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=60)
        self.store = dist.TCPStore(  # type: ignore[attr-defined]  # public, though not re-exported
            _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


def stay_on_loopback(parsed: Namespace) -> None:
    """Have torchrun, instead of `--standalone`, and the ranks listen on loopback, unless the environment says where."""
    rendezvous_handler_registry.register(_BACKEND, LoopbackRendezvous)
    parsed.standalone, parsed.rdzv_backend = False, _BACKEND
    parsed.rdzv_id, parsed.rdzv_endpoint = str(uuid.uuid4()), _HOST
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")

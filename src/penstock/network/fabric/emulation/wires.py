"""Messages between two hosts through torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A contiguous tensor to or from another rank; one at a time in each direction between the same two ranks."""

    tensor: Tensor
    peer: int


class Wire:
    """Exchanges the messages of one round."""

    def __init__(self) -> None:
        self._early: dict[int, list[dist.Work | None]] = {}

    def expect(self, receives: Sequence[Message]) -> None:
        """Posts the receives of a later `exchange`, which gets the same object. Call in the order of the exchanges."""
        if not _on_cuda(receives):  # NCCL's receives are posted together with their sends
            self._early[id(receives)] = [dist.irecv(m.tensor, m.peer) for m in receives]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives messages; returns when all sends have left and all receives have arrived."""
        if _on_cuda((*sends, *receives)):
            operations = [dist.P2POp(dist.irecv, m.tensor, m.peer) for m in receives]
            operations += [dist.P2POp(dist.isend, m.tensor, m.peer) for m in sends]
            for batched in dist.batch_isend_irecv(operations):  # unbatched, NCCL's would wait for each other
                batched.wait()
            torch.cuda.synchronize()
            return
        works = self._early.pop(id(receives), None) or [dist.irecv(m.tensor, m.peer) for m in receives]
        works += [dist.isend(m.tensor, m.peer) for m in sends]
        for work in works:
            if work is not None:
                work.wait()


def _on_cuda(messages: Sequence[Message]) -> bool:
    return any(message.tensor.is_cuda for message in messages)

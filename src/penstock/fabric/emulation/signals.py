"""How hosts begin at one moment: host 0 hears from every host how its trial went, and says when the next one begins.

Two messages a host and trial, where a barrier and a gather of the backend's own would take many: less of the processors
and of the network goes on what is not measured.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.fabric.emulation.joining import Members

_FIRST_NS = 2_000_000
"""What hosts get to hear the first word; later what they took, and some more."""

_MARGIN_NS = 150_000


class Word(NamedTuple):
    """What host 0 says to all.

    Attributes:
        due_ns: when the next trial begins, on this host's clock.
        flags: what else is to be done.
    """

    due_ns: int
    flags: int


class Signals:
    """One host's side; all hosts make the same calls."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._others = range(1, members.size) if members.rank == 0 else ()
        self._heard_after_ns: deque[int] = deque([_FIRST_NS], maxlen=20)
        """Of the last words: how long after it was said this host heard it; on host 0, the last of the hosts."""

    def report(self, stamps: Tensor) -> Tensor:
        """To host 0. Returns there what every host gave, a row each; on others this host's alone."""
        mine = torch.cat([torch.tensor([self._heard_after_ns[-1]]), stamps.flatten()])
        group = self._members.control
        if self._members.rank != 0:
            dist.send(mine, 0, group=group)
            return stamps.unsqueeze(0)
        everyone = torch.empty(self._members.size, len(mine), dtype=torch.int64)
        everyone[0] = mine
        for work in [dist.irecv(everyone[host], host, group=group) for host in self._others]:
            if work is not None:
                work.wait()
        self._heard_after_ns.append(int(everyone[1:, 0].max()))
        return everyone[:, 1:].view(-1, *stamps.shape)

    def word(self, flags: int, offset_ns: int) -> Word:
        """Host 0's word, on every host.

        Args:
            flags: what host 0 says; of others it does not matter.
            offset_ns: from this host's clock to host 0's.
        """
        group = self._members.control
        said = torch.zeros(3, dtype=torch.int64)
        if self._members.rank != 0:
            dist.recv(said, 0, group=group)
            sent_ns, due_ns, flags = said.tolist()
            self._heard_after_ns.append(max(time.monotonic_ns() + offset_ns - sent_ns, 0))
            return Word(due_ns - offset_ns, flags)
        sent_ns = time.monotonic_ns()
        due_ns = sent_ns + min(self._heard_after_ns) + _MARGIN_NS
        said[:] = torch.tensor([sent_ns, due_ns, flags])
        for work in [dist.isend(said, host, group=group) for host in self._others]:
            if work is not None:
                work.wait()
        return Word(due_ns, flags)

"""How hosts begin at one moment: host 0 hears from every host how its trial went, and says when the next one begins.

Two messages a host and trial, where a barrier and a gather of the backend's own would take many: less of the processors
and of the network goes on what is not measured. Hosts of one machine hear host 0 by its memory (`Board`). Between
machines its word takes as long as the network has it, so the moment lies so far ahead that nearly all words of late
would have been in time; how far apart hosts did begin is in the samples.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.fabric.emulation.board import Board
from penstock.fabric.emulation.joining import Members

_FIRST_NS = 2_000_000
"""What hosts get to hear the first word; later what they took, and some more."""
_WORDS, _IN_TIME = 100, 0.95
"""How many words of late are looked at, and which share of them would have been heard in time by all hosts."""

_MARGIN_NS = 150_000


class Word(NamedTuple):
    """What host 0 says to all.

    Attributes:
        due_ns: when the next trial begins, on this host's clock.
        flags: what else to do.
    """

    due_ns: int
    flags: int


class Signals:
    """One host's side; all hosts make the same calls."""

    def __init__(self, members: Members, board: Board | None = None) -> None:
        """
        Args:
            members: the hosts.
            board: that they share; None: host 0's word goes over the network.
        """
        self._members = members
        self._board = board
        self._others = range(1, members.size) if members.rank == 0 else ()
        self._heard_after_ns: deque[int] = deque([_FIRST_NS], maxlen=_WORDS)
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
        if self._members.rank != 0:
            sent_ns, due_ns, flags = self._hear()
            self._heard_after_ns.append(max(time.monotonic_ns() + offset_ns - sent_ns, 0))
            return Word(due_ns - offset_ns, flags)
        sent_ns = time.monotonic_ns()
        due_ns = sent_ns + enough(self._heard_after_ns) + _MARGIN_NS
        self._say(sent_ns, due_ns, flags)
        return Word(due_ns, flags)

    def _hear(self) -> tuple[int, int, int]:
        if self._board is not None:
            return self._board.hear()
        said = torch.zeros(3, dtype=torch.int64)
        dist.recv(said, 0, group=self._members.control)
        sent_ns, due_ns, flags = said.tolist()
        return sent_ns, due_ns, flags

    def _say(self, sent_ns: int, due_ns: int, flags: int) -> None:
        if self._board is not None:
            self._board.say(sent_ns, due_ns, flags)
            return
        said = torch.tensor([sent_ns, due_ns, flags])
        for work in [dist.isend(said, host, group=self._members.control) for host in self._others]:
            if work is not None:
                work.wait()


def enough(heard_after_ns: Sequence[int]) -> int:
    """Nanoseconds in which nearly all words were heard by all hosts; the smallest would be too early for most."""
    return sorted(heard_after_ns)[math.ceil(_IN_TIME * len(heard_after_ns)) - 1]

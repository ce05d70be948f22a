"""Messages between two hosts through torch.distributed: as they are, or delayed to the rate of a link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A contiguous tensor to or from another rank; one at a time in each direction between the same two."""

    tensor: Tensor
    peer: int


class Wire(Protocol):
    """Exchanges one round's messages. Returns when all that this rank sends has left and all it receives is here."""

    def expect(self, receives: Sequence[Message]) -> None:
        """Posts the receives of an exchange to come, which gets the same object. In the order of the exchanges."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """The messages of one round, in both directions."""


class _Posted:
    """Receives that wait for their messages."""

    def __init__(self) -> None:
        self._early: dict[int, list[dist.Work | None]] = {}

    def expect(self, receives: Sequence[Message]) -> None:
        if not any(message.tensor.is_cuda for message in receives):  # NCCL's go together with their sends
            self._early[id(receives)] = self._post(receives)

    def posted(self, receives: Sequence[Message]) -> list[dist.Work | None]:
        """Now, unless they were before."""
        early = self._early.pop(id(receives), None)
        return self._post(receives) if early is None else early

    def _post(self, receives: Sequence[Message]) -> list[dist.Work | None]:
        return [dist.irecv(m.tensor, m.peer) for m in receives]


class Plain(_Posted):
    """The network as it is."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if any(message.tensor.is_cuda for message in (*sends, *receives)):
            operations = [dist.P2POp(dist.irecv, m.tensor, m.peer) for m in receives]
            operations += [dist.P2POp(dist.isend, m.tensor, m.peer) for m in sends]
            for batched in dist.batch_isend_irecv(operations):  # NCCL: one by one they would wait for each other
                batched.wait()
            torch.cuda.synchronize()
            return
        works = self.posted(receives)
        works += [dist.isend(m.tensor, m.peer) for m in sends]
        for work in works:
            if work is not None:
                work.wait()


class Delayed(_Posted):
    """A link of a given rate, where the machine has no other: what a rank sends leaves one byte after the other, and
    what comes to it arrives so. Both ends are one queue each, as a host's cable is.

    Args:
        bytes_per_second: of the link.
        now, sleep: the clock, in seconds.
    """

    def __init__(
        self,
        bytes_per_second: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._seconds_per_byte = 1 / bytes_per_second
        self._now = now
        self._sleep = sleep
        self._sent = self._received = now()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        arriving = list(zip(receives, self.posted(receives), strict=True))
        leaving = []
        for message in sends:
            self._sent = max(self._sent, self._now()) + self._seconds(message)
            self._until(self._sent)
            leaving.append(dist.isend(message.tensor, message.peer))
        for message, work in arriving:
            if work is not None:
                work.wait()
            # Its last byte came now at the earliest; behind another message, as long after that as its own bytes take.
            self._received = max(self._now(), self._received + self._seconds(message))
            self._until(self._received)
        for work in leaving:
            if work is not None:
                work.wait()

    def _seconds(self, message: Message) -> float:
        return message.tensor.numel() * message.tensor.element_size() * self._seconds_per_byte

    def _until(self, moment: float) -> None:
        while (left := moment - self._now()) > 0:
            self._sleep(left)

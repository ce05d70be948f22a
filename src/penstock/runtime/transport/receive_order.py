"""Receives all messages from one rank to another in one order, whatever their links.

Back ends without tags (NCCL) match the k-th message that a rank sends another with the k-th receive that the other
starts. Schedules post receives in the order of the peer's sends (`check` proves it), so receives start in the order in
which they were posted, even if they cannot start immediately: while layouts are learned, a receive has to wait for a
header. It starts when it is needed, after all receives posted before it.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Receiver(Protocol):
    """One link's end at the receiving rank."""

    @property
    def can_start(self) -> bool:
        """Whether `start` returns without waiting for the sender."""

    def has_started(self, microbatch: int) -> bool: ...

    def start(self, microbatch: int) -> None:
        """Starts the receive of a message; waits for the sender if `can_start` is false."""


R = TypeVar("R", bound=Receiver)


class ReceiveOrder(Generic[R]):
    """The receives from one rank, first in, first out."""

    def __init__(self) -> None:
        self._due: deque[tuple[R, int]] = deque()

    def post(self, receiver: R, microbatch: int) -> None:
        """Queues a receive, and starts those that can start without waiting. Never blocks."""
        self._due.append((receiver, microbatch))
        while self._due and self._due[0][0].can_start:
            self._start_next()

    def start_until(self, receiver: R, microbatch: int) -> None:
        """Starts receives in order until this one has started.

        This waits no longer than necessary: what was posted earlier was sent earlier.
        """
        while not receiver.has_started(microbatch):
            self._start_next()

    def _start_next(self) -> None:
        receiver, microbatch = self._due.popleft()
        receiver.start(microbatch)

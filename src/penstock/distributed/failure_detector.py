"""Rank 0's view of all ranks: which are lost, and which wait for which.

Everything that decides whether to give up a rank is in this file, without sockets or threads. The rules:

    a rank that ...                     is given up when another waits for it and ...
    closed its connection, no goodbye   ... still does a beat later, or a rank has not joined by then; of several such
                                        ranks the first is named
    is silent, on this machine          ... that lasts for `stall_seconds`, unless the kernel says that its process runs
    is silent, on another machine       ... that lasts for `away_seconds`: it may be the network that is silent, even
                                        if the kernel has given up the connection
    said goodbye                        ... still does `stall_seconds` later

A rank that beats is never given up, however long it computes or sits in the caller's code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock._base.process import Process, ProcessState
from penstock.distributed.failure import Failure, RankStatus


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait for each kind of event, in seconds.

    Attributes:
        beat_seconds: time between two signs of life from a rank.
        stall_seconds: silence after which a rank that another waits for is looked up; it is lost if its process is
            stopped or gone.
        away_seconds: silence after which a rank on another machine, which cannot be looked up, is lost.
        warn_seconds: time between two warnings from a rank that waits for one that is alive.
        timeout_seconds: time after which such a wait ends the run.
        grace_seconds: time that a computing rank may still take to notice that the run has failed.
        join_seconds: time for all ranks to find each other at the start; each reads its data first, for example.
    """

    beat_seconds: float = 0.5
    stall_seconds: float = 5.0
    away_seconds: float = 60.0
    warn_seconds: float = 30.0
    timeout_seconds: float = 1800.0
    grace_seconds: float = 60.0
    join_seconds: float = 1800.0

    def was_suspended(self, seconds: float) -> bool:
        """Whether a loop that ticks every beat was itself stopped, so its knowledge of the other ranks is outdated."""
        return seconds > max(self.stall_seconds / 2, 2 * self.beat_seconds)


GONE = "its process is gone"


@dataclass(slots=True)
class _RankState:
    """What is known about one rank. Times are on the detector's clock."""

    heard_at: float
    process: Process | None = None
    status: RankStatus = field(default_factory=RankStatus)
    closed_at: float | None = None
    left_at: float | None = None


class FailureDetector:
    """Collects the beats of `ranks` ranks and judges who is lost.

    Not thread-safe: the server's thread owns it. `clock` returns seconds; `state` looks up a process.
    """

    def __init__(
        self,
        ranks: int,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        state: Callable[[Process], ProcessState] = Process.state,
    ) -> None:
        self.failure: Failure | None = None
        self._timeouts = timeouts
        self._clock = clock
        self._state = state
        self._judged_at = clock()
        self._ranks = [_RankState(heard_at=self._judged_at) for _ in range(ranks)]

    @property
    def absent(self) -> list[int]:
        """The ranks that have not joined."""
        return [rank for rank, entry in enumerate(self._ranks) if entry.process is None]

    @property
    def remaining(self) -> list[int]:
        """The ranks that may still need this detector: those that have neither left nor are gone."""
        ranks = enumerate(self._ranks)
        return [
            rank for rank, entry in ranks if entry.left_at is None and entry.closed_at is None and not self._lost(entry)
        ]

    @property
    def statuses(self) -> Sequence[RankStatus]:
        return [entry.status for entry in self._ranks]

    def join(self, rank: int, process: Process) -> None:
        """Record that `rank` has joined, or is back after its connection broke."""
        entry = self._ranks[rank]
        entry.process, entry.closed_at, entry.heard_at = process, None, self._clock()

    def beat(self, rank: int, status: RankStatus) -> None:
        """Record a sign of life from `rank`; its last if `left`. Raise ValueError if it waits for an unknown rank."""
        if not status.fits(len(self._ranks)):
            raise ValueError(f"rank {rank} {status.doing}, but the ranks are 0 to {len(self._ranks) - 1}")
        entry = self._ranks[rank]
        if entry.left_at is not None:
            return
        entry.status, entry.heard_at = status, self._clock()
        if status.left:
            entry.left_at = entry.heard_at

    def record_disconnect(self, rank: int) -> None:
        """Record that the connection of `rank` closed. Unless it said goodbye, its process is most likely gone."""
        if self._ranks[rank].left_at is None:
            self._ranks[rank].closed_at = self._clock()

    def record_failure(self, failure: Failure) -> None:
        """Record why the run ends, unless it is known. Raise ValueError if it names an unknown rank."""
        if not 0 <= failure.rank < len(self._ranks):
            raise ValueError(f"rank {failure.rank} {failure.kind}, but the ranks are 0 to {len(self._ranks) - 1}")
        self.failure = self.failure or failure

    def judge(self) -> None:
        """Record the first rank that another waits for in vain. Must be called every beat."""
        now = self._clock()
        was_suspended, self._judged_at = self._timeouts.was_suspended(now - self._judged_at), now
        if was_suspended:  # this process itself was stopped: what other ranks sent meanwhile is still unread
            for entry in self._ranks:
                entry.heard_at = now
            return
        beat = self._timeouts.beat_seconds
        if self.absent and any(entry.closed_at is not None and now - entry.closed_at >= beat for entry in self._ranks):
            self._fail_first_disconnected()  # all wait for each other now
        for waiter, entry in enumerate(self._ranks):
            if entry.left_at is None and entry.closed_at is None:
                for peer in entry.status.peers:
                    self._judge_peer(waiter, peer)

    def _judge_peer(self, waiter: int, peer: int) -> None:
        waiting, entry = self._ranks[waiter], self._ranks[peer]
        ended_at = entry.left_at if entry.left_at is not None else entry.closed_at
        if ended_at is not None:  # its last message may still be in transit, so the wait must outlast it
            waited_since_end = waiting.heard_at - max(ended_at, waiting.heard_at - waiting.status.seconds)
            if entry.left_at is None and waited_since_end >= self._timeouts.beat_seconds:
                self._fail_first_disconnected()
            elif waited_since_end >= self._timeouts.stall_seconds:
                waits = next(position for position in waiting.status.positions if peer in position.peers)
                reason = f"its program ended while rank {waiter} {waits}"
                self.record_failure(Failure(peer, None, reason, "left"))
        elif (explanation := self._lost(entry)) is not None:
            self.record_failure(Failure(peer, entry.status.doing.action or None, explanation, "lost"))

    def _fail_first_disconnected(self) -> None:
        """Record the first rank that is gone: a launcher then ends others on its machine, which are not the cause."""
        ranks = enumerate(self._ranks)
        _, first = min(
            (entry.closed_at, rank) for rank, entry in ranks if entry.closed_at is not None and entry.left_at is None
        )
        self.record_failure(Failure(first, self._ranks[first].status.doing.action or None, GONE, "lost"))

    def _lost(self, entry: _RankState) -> str | None:
        """Return what the silence of a rank that has joined means; None while it may be alive."""
        if entry.process is None:
            return None
        return explain_silence(self._clock() - entry.heard_at, partial(self._state, entry.process), self._timeouts)


def explain_silence(seconds: float, state: Callable[[], ProcessState], timeouts: Timeouts) -> str | None:
    """Return what a rank's silence means; None before `stall_seconds`, and if its process may be running but unable to
    answer. `state` looks the process up."""
    match "running" if seconds < timeouts.stall_seconds else state():
        case "running":
            return None
        case "stopped":
            return f"its process is stopped (no sign of life for {seconds:.0f} s)"
        case "gone":
            return GONE
        case "unknown":
            return f"no sign of life for {seconds:.0f} s" if seconds >= timeouts.away_seconds else None

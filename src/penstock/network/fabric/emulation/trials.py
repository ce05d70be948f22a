"""Run trials: all hosts begin at the same moment, and host 0 receives everyone's stamps after the last transfer.

Hosts report to host 0, which announces when the next trial begins. This takes two messages per host and trial. A
barrier and a gather from the backend would take many, and waste processor and network time on work that is not
measured. Hosts of one machine read host 0's announcements from shared memory (`StartBoard`). Between machines,
announcements travel over the network, so the start is set far enough ahead that nearly all recent announcements would
have arrived in time. The samples show how far apart the hosts actually started.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.errors import FabricError
from penstock._base.process import is_alive
from penstock.distributed.launch.step_file import announcer
from penstock.network.fabric.emulation import clock
from penstock.network.fabric.emulation.collectives import Part
from penstock.network.fabric.emulation.rendezvous import Members, wait_for
from penstock.network.fabric.emulation.spec import BOARD, Spec

# -- how all hosts start a trial at the same moment -------------------------------------------------------------------

_FIRST_NS = 2_000_000
"""The time allowed for the first announcement to arrive; later ones get what recent ones took, plus a margin."""
_MAX_RECENT, _IN_TIME_FRACTION = 100, 0.95
"""How many recent announcements count, and the fraction of them that must have reached all hosts in time."""
_MARGIN_NS = 150_000

_POLL_SECONDS, _ALIVE_CHECK_SECONDS = 1e-4, 0.1


class StartBoard:
    """One host's view of memory in which host 0 announces when a trial begins, if all hosts are on one machine.

    An announcement over the network under test would be delayed or lost like any other message, and hosts would start
    at different moments. Waiting hosts poll the memory several thousand times per second.

    Args:
        path: the file.
        writes: True on host 0.
        stall_seconds: how long to wait for an announcement before giving up.
    """

    def __init__(self, path: str, *, writes: bool, stall_seconds: float) -> None:
        # How many announcements there were; the last one's values: sent_ns, due_ns and flags; the writer's process.
        with open(path, "r+b", buffering=0) as file:
            file.truncate(8 * 5)
            self._numbers = memoryview(mmap.mmap(file.fileno(), 8 * 5)).cast("q")
        self._seen = 0
        self._stall_seconds = stall_seconds
        if writes:
            self._numbers[4] = os.getpid()

    def announce(self, sent_ns: int, due_ns: int, flags: int) -> None:
        """Announce a trial. Called on host 0, once every host has received the previous announcement."""
        self._seen += 1
        self._numbers[1], self._numbers[2], self._numbers[3] = sent_ns, due_ns, flags
        self._numbers[0] = self._seen  # last, because readers poll it

    def wait(self) -> tuple[int, int, int]:
        """Wait for the next announcement, and return what `announce` was given. Called on the other hosts. Raise
        FabricError: host 0 has ended, or made no announcement in time."""
        began = last_check = time.monotonic()
        while self._numbers[0] == self._seen:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now - last_check > _ALIVE_CHECK_SECONDS:
                last_check = now
                if self._numbers[4] and not is_alive(self._numbers[4]):
                    raise FabricError("host 0 has ended")
                if now - began > self._stall_seconds:
                    raise FabricError(f"host 0 has not answered for {self._stall_seconds:g} s")
        self._seen += 1
        return self._numbers[1], self._numbers[2], self._numbers[3]


class StartSignal(NamedTuple):
    """Host 0's announcement to all hosts: when the next trial begins, on this host's clock, and what else to do."""

    due_ns: int
    flags: int


class Signals:
    """One host's side of the signaling; all hosts make the same calls."""

    def __init__(self, members: Members, board: StartBoard | None = None) -> None:
        """Create this host's side. `board`: what all hosts share; if None, announcements go over the network."""
        self._members = members
        self._board = board
        self._peers = range(1, members.size) if members.rank == 0 else ()
        self._latencies_ns: deque[int] = deque([_FIRST_NS], maxlen=_MAX_RECENT)
        """How long recent announcements took to reach this host; on host 0, to reach the last host."""

    def report(self, stamps: Tensor) -> Tensor:
        """Send stamps to host 0, which gets every host's, one row per host; other hosts get their own row only."""
        message = torch.cat([torch.tensor([self._latencies_ns[-1]]), stamps.flatten()])
        group = self._members.control
        if self._members.rank != 0:
            dist.send(message, 0, group=group)
            return stamps.unsqueeze(0)
        messages = torch.empty(self._members.size, len(message), dtype=torch.int64)
        messages[0] = message
        wait_for([dist.irecv(messages[host], host, group=group) for host in self._peers])
        self._latencies_ns.append(int(messages[1:, 0].max()))
        return messages[:, 1:].view(-1, *stamps.shape)

    def next(self, flags: int, offset_ns: int) -> StartSignal:
        """Return host 0's announcement, with host 0's flags, on every host; `offset_ns` is what to add to this host's
        clock to get host 0's."""
        group = self._members.control
        if self._members.rank != 0:
            if self._board is not None:
                sent_ns, due_ns, flags = self._board.wait()
            else:
                dist.recv(received := torch.zeros(3, dtype=torch.int64), 0, group=group)
                sent_ns, due_ns, flags = received.tolist()
            self._latencies_ns.append(max(time.monotonic_ns() + offset_ns - sent_ns, 0))
            return StartSignal(due_ns - offset_ns, flags)
        sent_ns = time.monotonic_ns()
        due_ns = sent_ns + needed_ns(self._latencies_ns) + _MARGIN_NS
        if self._board is not None:
            self._board.announce(sent_ns, due_ns, flags)
            return StartSignal(due_ns, flags)
        announcement = torch.tensor([sent_ns, due_ns, flags])
        wait_for([dist.isend(announcement, host, group=group) for host in self._peers])
        return StartSignal(due_ns, flags)


def needed_ns(latencies_ns: Sequence[int]) -> int:
    """Return the nanoseconds in which nearly all announcements reached all hosts; the minimum is usually too short."""
    return sorted(latencies_ns)[math.ceil(_IN_TIME_FRACTION * len(latencies_ns)) - 1]


# -- trials ------------------------------------------------------------------------------------------------------------

_KEEP, _ESTIMATE, _WARM = 1, 2, 4
"""Flags that host 0 announces before a trial: send the last trial's rounds; re-estimate the clocks; warm-up."""
_NOTHING = torch.zeros(1, dtype=torch.int64)
"""What hosts report when they only meet."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial, on host 0.

    Attributes:
        stamps: start and end by transfer and rank, shape (ranks, transfers, 2), in nanoseconds on rank 0's clock; -1
            where a rank takes no part.
        round_rows: rows of steps.csv for the previous trial, if it was the first or the slowest so far; else empty.
        counts: False for a warm-up trial.
    """

    stamps: Tensor
    round_rows: Sequence[tuple[int, ...]]
    counts: bool = True

    def rows(self, number: int) -> Iterable[tuple[int, ...]]:
        """Yield rows of samples.csv."""
        for rank, transfers in enumerate(self.stamps.tolist()):
            for transfer, (start, end) in enumerate(transfers):
                if start >= 0:
                    yield number, transfer, rank, start, end

    def longest_ns(self) -> list[int]:
        """Return, for each transfer, the longest time that a rank took, in nanoseconds."""
        longest: list[int] = (self.stamps[:, :, 1] - self.stamps[:, :, 0]).amax(0).tolist()
        return longest


class Trials:
    """Runs trials one by one. Its calls are collective: every host makes the same ones."""

    def __init__(self, spec: Spec, parts: Sequence[Part | None], members: Members) -> None:
        self._spec = spec
        self._parts = parts
        self._members = members
        self._offset_ns = clock.estimate(members.control).offset_ns
        self._estimated_at = time.monotonic()
        self._one_clock = clock.is_shared(members.control)
        board = None
        if self._one_clock and (path := os.environ.get(BOARD)):
            board = StartBoard(path, writes=members.rank == 0, stall_seconds=spec.stall_seconds)
        self._signals = Signals(members, board)
        self._slowest_ns = -1
        self._number = -1
        self._announce = announcer()
        self._keep = False
        """Whether the last trial's rounds are worth keeping; host 0 decides."""

    def run_trial(self, *, counts: bool = True) -> Trial:
        """Run the next trial; on hosts other than 0, its stamps are only this host's. Host 0 says whether it counts, or
        belongs to the warm-up."""
        for part in self._parts:
            if part is not None:
                part.reset()
        due_ns, round_rows, counts = self._agree(counts)
        if self._announce is not None and counts:
            self._announce(self._number + 1)
        _sleep_until(due_ns)
        stamps = self._run(due_ns)
        self._number += counts
        # On rank 0's clock.
        all_stamps = self._signals.report(torch.where(stamps >= 0, stamps + self._offset_ns, stamps))
        if counts and self._members.rank == 0:  # other hosts have only their own, or none at all
            took_ns = int(all_stamps[:, :, 1].max() - all_stamps[all_stamps >= 0].min())
            self._keep = took_ns > self._slowest_ns
            self._slowest_ns = max(took_ns, self._slowest_ns)
        return Trial(all_stamps, round_rows, counts)

    def last_rounds(self) -> Sequence[tuple[int, ...]]:
        """Return the rounds of the last trial, if they are kept."""
        return self._agree()[1]

    def _agree(self, counts: bool = True) -> tuple[int, Sequence[tuple[int, ...]], bool]:
        """Agree on the next trial: its start on this host's clock, the last one's rounds, whether it counts."""
        round_rows: Sequence[tuple[int, ...]] = ()
        while True:
            stale = not self._one_clock and time.monotonic() - self._estimated_at > clock.CLOCK_SECONDS
            signal = self._signals.next(self._keep * _KEEP | stale * _ESTIMATE | (not counts) * _WARM, self._offset_ns)
            if not signal.flags & ~_WARM:
                return signal.due_ns, round_rows, not signal.flags & _WARM
            if signal.flags & _KEEP:
                round_rows = self._gather_rounds()
                self._keep = False
            if signal.flags & _ESTIMATE:
                self._offset_ns = clock.estimate(self._members.control).offset_ns
                self._estimated_at = time.monotonic()

    def _run(self, due_ns: int) -> Tensor:
        """Return the start and end of every transfer, on this host's clock."""
        stamps = torch.full((len(self._parts), 2), -1, dtype=torch.int64)
        ready_ns, done_ns = due_ns, due_ns
        for number, part in enumerate(self._parts):
            if number and self._spec.synchronizes_between_transfers:
                # Otherwise a root would start the next transfer while the network still carries the previous one's
                # data, and time of one transfer would be counted in the other. nccl-tests also has a barrier there.
                self._signals.report(_NOTHING)
                ready_ns = done_ns = self._signals.next(0, self._offset_ns).due_ns
                _sleep_until(done_ns)
            if part is None:
                continue
            compute_ns = int(part.participant.transfer.compute_on(self._members.rank) * 1e9)
            # With overlap, computing continues during a transfer; without, it starts when the transfer has ended.
            ready_ns = (ready_ns if self._spec.overlap else done_ns) + compute_ns
            if compute_ns:
                _sleep_until(ready_ns)
            start_ns = time.monotonic_ns()
            for _ in range(self._spec.iterations):
                part.run()
            done_ns = time.monotonic_ns()
            stamps[number, 0], stamps[number, 1] = start_ns, done_ns
        return stamps

    def _gather_rounds(self) -> Sequence[tuple[int, ...]]:
        """Gather the rounds of the last trial, as rows of steps.csv."""
        own_rows = [
            (self._number, number, self._members.rank, round_number, start + self._offset_ns, end + self._offset_ns)
            for number, part in enumerate(self._parts)
            if part is not None
            for round_number, start, end in part.stamps()
        ]
        all_rows: list[list[tuple[int, ...]]] = [[] for _ in range(self._members.size)]
        dist.gather_object(own_rows, all_rows if self._members.rank == 0 else None, dst=0, group=self._members.control)
        return [row for rows in all_rows for row in rows]


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)

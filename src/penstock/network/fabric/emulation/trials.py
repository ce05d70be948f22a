"""Run trials: all hosts begin at the same moment, and host 0 receives everyone's stamps after the last transfer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.distributed.launch.step_file import announcer
from penstock.network.fabric.emulation import clock
from penstock.network.fabric.emulation.collectives import Part
from penstock.network.fabric.emulation.joining import Members
from penstock.network.fabric.emulation.signals import BOARD, Signals, StartBoard
from penstock.network.fabric.emulation.spec import Spec

_KEEP, _ESTIMATE, _WARM = 1, 2, 4
"""Flags that host 0 announces before a trial: send the last trial's steps; re-estimate the clocks; warm-up."""
_NOTHING = torch.zeros(1, dtype=torch.int64)
"""What hosts report when they only meet."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial, on host 0.

    Attributes:
        stamps: start and end by transfer and rank, shape (ranks, transfers, 2), in nanoseconds on rank 0's clock; -1
            where a rank takes no part.
        step_rows: rows of steps.csv for the previous trial, if it was the first or the slowest so far; otherwise empty.
        counts: False for a warm-up trial.
    """

    stamps: Tensor
    step_rows: Sequence[tuple[int, ...]]
    counts: bool = True

    def rows(self, number: int) -> Iterable[tuple[int, ...]]:
        """Yields rows of samples.csv."""
        for rank, transfers in enumerate(self.stamps.tolist()):
            for transfer, (start, end) in enumerate(transfers):
                if start >= 0:
                    yield number, transfer, rank, start, end

    def longest_ns(self) -> list[int]:
        """Returns, for each transfer, the longest time that a rank took, in nanoseconds."""
        found: list[int] = (self.stamps[:, :, 1] - self.stamps[:, :, 0]).amax(0).tolist()
        return found


class Trials:
    """Runs trials one by one. Its calls are collective: every host makes the same ones."""

    def __init__(self, spec: Spec, parts: Sequence[Part | None], members: Members) -> None:
        self._spec = spec
        self._parts = parts
        self._members = members
        self._offset_ns = clock.estimate(members.control).offset_ns
        self._estimated_at = time.monotonic()
        self._one_clock = clock.is_one(members.control)
        board = None
        if self._one_clock and (path := os.environ.get(BOARD)):
            board = StartBoard(path, writes=members.rank == 0, stall_seconds=spec.stall_seconds)
        self._signals = Signals(members, board)
        self._slowest_ns = -1
        self._number = -1
        self._announce = announcer()
        self._keeps = False
        """Whether the last trial's steps are worth keeping; host 0 decides."""

    def one(self, *, counts: bool = True) -> Trial:
        """Runs the next trial; on hosts other than 0, its stamps are only this host's. Host 0 says whether it counts,
        or belongs to the warm-up."""
        for part in self._parts:
            if part is not None:
                part.reset()
        due_ns, kept, counts = self._agree(counts)
        if self._announce is not None and counts:
            self._announce(self._number + 1)
        _sleep_until(due_ns)
        stamps = self._run(due_ns)
        self._number += counts
        # On rank 0's clock.
        whole = self._signals.report(torch.where(stamps >= 0, stamps + self._offset_ns, stamps))
        if counts and self._members.rank == 0:  # other hosts have only their own, or none at all
            took_ns = int(whole[:, :, 1].max() - whole[whole >= 0].min())
            self._keeps = took_ns > self._slowest_ns
            self._slowest_ns = max(took_ns, self._slowest_ns)
        return Trial(whole, kept, counts)

    def last_steps(self) -> Sequence[tuple[int, ...]]:
        """Returns the step rows of the last trial, if they are kept."""
        return self._agree()[1]

    def _agree(self, counts: bool = True) -> tuple[int, Sequence[tuple[int, ...]], bool]:
        """Agrees on the next trial: its start on this host's clock, the last one's step rows, whether it counts."""
        kept: Sequence[tuple[int, ...]] = ()
        while True:
            stale = not self._one_clock and time.monotonic() - self._estimated_at > clock.CLOCK_SECONDS
            word = self._signals.word(self._keeps * _KEEP | stale * _ESTIMATE | (not counts) * _WARM, self._offset_ns)
            if not word.flags & ~_WARM:
                return word.due_ns, kept, not word.flags & _WARM
            if word.flags & _KEEP:
                kept = self._gather_steps()
                self._keeps = False
            if word.flags & _ESTIMATE:
                self._offset_ns = clock.estimate(self._members.control).offset_ns
                self._estimated_at = time.monotonic()

    def _run(self, due_ns: int) -> Tensor:
        """Returns the start and end of every transfer, on this host's clock."""
        stamps = torch.full((len(self._parts), 2), -1, dtype=torch.int64)
        ready_ns, done_ns = due_ns, due_ns
        for number, part in enumerate(self._parts):
            if number and self._spec.meets:
                # Otherwise a root would start the next transfer while the network still carries the previous one's
                # data, and time of one transfer would be counted in the other. nccl-tests also has a barrier there.
                self._signals.report(_NOTHING)
                ready_ns = done_ns = self._signals.word(0, self._offset_ns).due_ns
                _sleep_until(done_ns)
            if part is None:
                continue
            compute_ns = int(part.place.transfer.compute_of(self._members.rank) * 1e9)
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

    def _gather_steps(self) -> Sequence[tuple[int, ...]]:
        """Gathers the rounds of the last trial, as rows of steps.csv."""
        mine = [
            (self._number, number, self._members.rank, at, start + self._offset_ns, end + self._offset_ns)
            for number, part in enumerate(self._parts)
            if part is not None
            for at, start, end in part.stamps()
        ]
        everyone: list[list[tuple[int, ...]]] = [[] for _ in range(self._members.size)]
        dist.gather_object(mine, everyone if self._members.rank == 0 else None, dst=0, group=self._members.control)
        return [row for rows in everyone for row in rows]


def _sleep_until(due_ns: int) -> None:
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / 1e9)

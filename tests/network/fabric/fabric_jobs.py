"""What ranks run of the emulation, each function on every rank of a pool."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from penstock._base.errors import FabricError
from penstock.distributed import host_clock
from penstock.network.fabric.algorithms import ENGINE, generate
from penstock.network.fabric.emulation import clock, probe
from penstock.network.fabric.emulation import trials as signals
from penstock.network.fabric.emulation.collectives import Engine, Message, Stepwise, Wire, check_result
from penstock.network.fabric.emulation.host import _check, _follow, _parts, _warm_up
from penstock.network.fabric.emulation.payload import TYPES, Participant
from penstock.network.fabric.emulation.rendezvous import Members
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.emulation.trials import Trials
from penstock.network.fabric.steps import Collective, StepList
from penstock.network.fabric.workload import Op, Transfer, Workload

CPU = torch.device("cpu")
Case = tuple[Collective, str, int, str, Op, tuple[int, ...]]
"""A collective, its algorithm, elements and their type, what reduces them, and their shares."""


def part_of(rank: int, case: Case) -> Stepwise | Engine | None:
    """A rank's part in a transfer among all ranks; of the first two, where it is a message."""
    collective, algorithm, elements, dtype, op, shares = case
    members = tuple(range(2 if collective == "send" else dist.get_world_size()))
    if rank not in members:
        return None
    transfer = Transfer("t", elements * TYPES[dtype].itemsize, collective, shares=shares)
    place = Participant(transfer, members, rank, elements, 3, TYPES[dtype], op)
    if algorithm == ENGINE:
        return Engine(place, None, CPU)
    return Stepwise(place, generate(collective, algorithm, len(members), shares=shares), Wire(), CPU)


def everything(rank: int, cases: Sequence[Case]) -> list[str]:
    """What is wrong with them."""
    faults = []
    for case in cases:
        if (part := part_of(rank, case)) is None:
            continue
        if (fault := check_result(part)) is not None:
            faults.append(f"{case}: {fault}")
        if (part.result() is None) != (part.participant.expected(part.elements) is None):
            faults.append(f"{case}: rank {rank} is checked for no result, or has none")
        if part.elements < case[2]:
            faults.append(f"{case}: only {part.elements} are sent")
    return faults


class Spoiling(Wire):
    """A wire on which the first number of what a rank receives changes.

    Args:
        victim: the rank; None: every one.
    """

    def __init__(self, victim: int | None = None) -> None:
        super().__init__()
        self._victim = victim

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        super().exchange(sends, receives)
        for message in receives:
            message.tensor[0] += self._victim in (None, dist.get_rank())


class Slow(Wire):
    """A wire on which every message takes its time at both ends."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__()
        self._bytes_per_second = bytes_per_second

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        time.sleep(sum(m.tensor.nbytes for m in sends) / self._bytes_per_second)
        super().exchange(sends, receives)
        time.sleep(sum(m.tensor.nbytes for m in receives) / self._bytes_per_second)


def without_each_move(rank: int, collective: Collective, algorithm: str) -> list[list[str | None]]:
    """For each move of a step list: what is wrong without it, right from the start and after a right result."""
    right = part_of(rank, (collective, algorithm, 12, "float32", "sum", ()))
    assert isinstance(right, Stepwise)
    assert check_result(right) is None
    place, found = right.participant, []
    for steps in _shortened(generate(collective, algorithm, len(place.members))):
        fresh, used = Stepwise(place, steps, Wire(), CPU), Stepwise(place, steps, Wire(), CPU)
        used._memory.copy_(right._memory)
        found.append([check_result(fresh), check_result(used)])
    return found


def _shortened(steps: StepList) -> Iterator[StepList]:
    for number, moves in enumerate(steps.rounds):
        for lost in moves:
            rest = tuple(move for move in moves if move != lost)
            yield replace(steps, rounds=(*steps.rounds[:number], rest, *steps.rounds[number + 1 :]))


def begun_together(rank: int, spec: Spec, margin_ns: int, path: str | None) -> Any:
    """Stamps of some trials that begin so long after the word, which goes over a board if a path is given."""
    margin, signals._MARGIN_NS = signals._MARGIN_NS, margin_ns
    if path is not None:
        os.environ[signals.BOARD] = path
    members = Members(rank, spec.hosts, None, None)
    try:
        trials = Trials(spec, _parts(spec, members, Wire()), members)
        assert (trials._signals._board is None) == (path is None)
        return np.stack([trials.run_trial().stamps.numpy() for _ in range(3)])
    finally:
        signals._MARGIN_NS = margin
        os.environ.pop(signals.BOARD, None)


class _Ahead:
    """A clock that is ahead of this machine's; how long it has been running is told in seconds that are made."""

    def __init__(self, ns: int) -> None:
        self._ns = ns
        self.seconds = 0.0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self._ns

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def clocks(rank: int, ahead_ns: int, same_kernel: bool) -> dict[str, Any]:
    """The offset of a rank whose clock is as far ahead of rank 0's, for every rank in front of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_clock, "clock_name", lambda: "one" if same_kernel else f"kernel {rank}")
        patch.setattr(host_clock, "now_ns", _Ahead(rank * ahead_ns).monotonic_ns)
        return asdict(clock.estimate())


def on_other_clocks(rank: int, spec: Spec, ahead_ns: int, passes: float) -> tuple[int, int, Any, int]:
    """Three trials of hosts whose clocks are so far ahead of the one in front; so many seconds go by before each.

    Returns when they began and ended on this machine's clock, their stamps, and how often the clocks were measured.
    """
    estimates = 0
    estimate = clock.estimate

    def counted(group: dist.ProcessGroup | None = None) -> clock.Offset:
        nonlocal estimates
        estimates += 1
        return estimate(group)

    ahead = _Ahead(rank * ahead_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "time", ahead)
        patch.setattr(host_clock, "now_ns", ahead.monotonic_ns)
        patch.setattr(host_clock, "clock_name", lambda: f"kernel {rank if ahead_ns else 0}")
        patch.setattr(clock, "estimate", counted)
        members = Members(rank, spec.hosts, None, None)
        began = time.monotonic_ns()
        made = Trials(spec, _parts(spec, members, Wire()), members)
        found = []
        for _ in range(3):
            ahead.seconds += passes
            found.append(made.run_trial().stamps.numpy())
        return began, time.monotonic_ns(), np.stack(found), estimates


def trials_of(rank: int, spec: Spec, count: int, wire: Wire | None = None) -> Any:
    """Some trials of a spec on a pool: (stamps of each, rows of steps), or what the check has found."""
    members = Members(rank, spec.hosts, None, None)
    parts = _parts(spec, members, wire or Wire())
    try:
        _check(spec, parts, members)
    except RuntimeError as error:
        return str(error)
    trials = Trials(spec, parts, members)
    began = time.monotonic_ns()
    found = [trials.run_trial() for _ in range(count)]
    rows = [row for trial in found for row in trial.round_rows] + list(trials.last_rounds())
    return began, time.monotonic_ns(), [trial.stamps.numpy() for trial in found], rows


class Settling:
    """A part that takes less and less time."""

    def __init__(self, part: Stepwise | Engine, seconds: float, factor: float) -> None:
        self._part, self._seconds, self._factor, self.runs = part, seconds, factor, 0

    def run(self) -> None:
        self.runs += 1
        time.sleep(self._seconds)
        self._seconds *= self._factor
        self._part.run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def warmed_up(rank: int, spec: Spec, seconds: float, factor: float) -> Any:
    """On rank 0 what its warm-up says, after how many trials, and the trials that count; on others None."""
    members = Members(rank, spec.hosts, None, None)
    parts: Any = [part and Settling(part, seconds, factor) for part in _parts(spec, members, Wire())]
    trials = Trials(spec, parts, members)
    if rank:
        return _follow(spec, trials) and None
    found = _warm_up(spec, trials)
    runs = parts[0].runs
    counted = [trials.run_trial() for _ in range(spec.trials)]
    steps = [row for trial in counted for row in trial.round_rows] + list(trials.last_rounds())
    return found, runs, [trial.longest_ns() for trial in counted], steps


def probed(rank: int, spec: Spec, wire: Wire | None = None) -> Any:
    """The links as they are measured in little time, or what is wrong with them."""
    names = ("HALF_SECONDS", "TRIPS_SECONDS", "MAX_BYTES")
    before = [getattr(probe, name) for name in names]
    probe.HALF_SECONDS, probe.TRIPS_SECONDS, probe.MAX_BYTES = 0.05, 0.05, 512 * 1024
    try:
        return probe.measure_links(spec, wire or Wire(), Members(rank, spec.hosts, None, None))
    except FabricError as error:
        return str(error)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(probe, name, value)


def pipeline(hosts: int) -> Workload:
    """Two pipelines of hosts / 2 ranks: messages within each, ties between first and last, replicas' sums."""
    each = hosts // 2
    made = []
    for first in (0, each):
        for rank in range(first, first + each - 1):
            made.append(Transfer(f"act {rank}", 4004, "send", (rank, rank + 1), kind="activation"))
        for rank in range(first + each - 1, first, -1):
            made.append(Transfer(f"grad {rank}", 4004, "send", (rank, rank - 1), kind="activation gradient"))
        if each > 1:
            made.append(Transfer(f"tied {first}", 36, "all_reduce", (first + each - 1, first), kind="tied gradient"))
    for rank in range(each):
        made.append(Transfer(f"stage {rank}", 20, "all_reduce", (rank, rank + each), 1e-4))
    return Workload("pipeline", tuple(made), hosts)

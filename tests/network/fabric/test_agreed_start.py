"""All hosts begin a trial at one moment: how it is said on one machine, and how far ahead it lies between machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import fabric_jobs as jobs
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock._base.errors import FabricError
from penstock.network.fabric.emulation import trials as signals
from penstock.network.fabric.emulation.rendezvous import Members
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.emulation.trials import Signals, StartBoard
from penstock.network.fabric.workload import Workload, mlp
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.alone

MARGIN_NS = 30_000_000


@pytest.fixture
def path() -> Iterator[str]:
    descriptor = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


@pytest.mark.distributed
@pytest.mark.parametrize("by_board", [True, False])
def test_no_host_begins_before_the_moment(ranks2: Ranks, path: str, by_board: bool) -> None:
    spec = Spec(Workload.from_sizes([4]), 2, measures_links=False)
    stamps: np.ndarray = ranks2.run(jobs.begun_together, spec, MARGIN_NS, path if by_board else None)[0]
    start, end = stamps[:, :, 0, 0], stamps[:, :, 0, 1]  # trial, rank
    assert (start[1:].min(1) - end[:-1].max(1) >= MARGIN_NS).all(), "the word is said when all have ended"


def test_between_hosts_of_one_machine_no_word_goes_over_the_network(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow it is, and whatever it loses, they begin at one moment."""
    monkeypatch.setattr(signals, "dist", None)
    host, other = (
        signals.Signals(Members(rank, 2, None, None), StartBoard(path, writes=rank == 0, stall_seconds=10))
        for rank in range(2)
    )
    for flags in (0, 2, 0):
        assert host.next(flags, 0) == (word := other.next(0, 0))
        assert word.flags == flags


def test_nobody_waits_for_a_host_that_has_ended_or_is_silent(path: str) -> None:
    StartBoard(path, writes=True, stall_seconds=10)
    with pytest.raises(FabricError, match=r"host 0 has not answered for 0\.2 s"):
        StartBoard(path, writes=False, stall_seconds=0.2).wait()
    imported = "from penstock.network.fabric.emulation.trials import StartBoard"
    code = f"{imported}; StartBoard({path!r}, writes=True, stall_seconds=1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(FabricError, match="host 0 has ended"):
        StartBoard(path, writes=False, stall_seconds=10).wait()


@pytest.mark.distributed
def test_sizes_by_hand_do_not_run_into_each_other(ranks3: Ranks) -> None:
    """The root of a scatter has sent before the others have received; the next size waits until they have."""
    spec = Spec(Workload.from_sizes([1200, 1200], "scatter"), 3, algorithm="direct", measures_links=False)
    *_, trials, _ = ranks3.run(jobs.trials_of, spec, 3, jobs.Slow(4e4))[0]
    stamps = np.stack(trials)  # trial, rank, transfer, start and end
    assert (stamps[:, :, 1, 0].min(1) > stamps[:, :, 0, 1].max(1)).all()
    assert not Spec(mlp(), 2).synchronizes_between_transfers, "what a job sends has an order of its own"


@pytest.mark.distributed
def test_hosts_that_take_no_part_are_no_end_of_a_run(ranks3: Ranks) -> None:
    spec = Spec(Workload.from_sizes([400, 40], "send"), 3, algorithm="direct", measures_links=False)
    *_, trials, rows = ranks3.run(jobs.trials_of, spec, 3)[0]
    stamps = np.stack(trials)
    assert (stamps[:, :2] > 0).all()
    assert (stamps[:, 2] == -1).all()
    assert {row[2] for row in rows} == {0, 1}


MS = 1_000_000
AHEAD_NS = (0, 90_000 * MS, -40_000 * MS)
"""By how much each host's clock is ahead of the true time."""


class Network:
    """Stands for `torch.distributed` and `time`, of the host whose turn it is. A message takes 5 to 7 ms; one in
    fifty is lost and takes 200 ms more."""

    def __init__(self) -> None:
        self.host = 0
        self.now_ns = [0] * len(AHEAD_NS)  # the true time
        self._messages = 0
        self._under_way: dict[tuple[int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)

    def monotonic_ns(self) -> int:
        return self.now_ns[self.host] + AHEAD_NS[self.host]

    def send(self, tensor: Tensor, to: int, group: object = None) -> None:
        self._messages += 1
        took = (5 + to + 200 * (self._messages % 50 == 0)) * MS
        self._under_way[self.host, to].append((self.now_ns[self.host] + took, tensor.clone()))

    def recv(self, tensor: Tensor, source: int, group: object = None) -> None:
        came, sent = self._under_way[source, self.host].popleft()
        tensor.copy_(sent)
        self.now_ns[self.host] = max(self.now_ns[self.host], came)

    isend, irecv = send, recv  # what is received was sent before, as one host takes its turn after the other


def test_announcements_that_are_lost_delay_a_start_but_no_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    network, hosts = Network(), range(len(AHEAD_NS))
    monkeypatch.setattr(signals, "dist", network)
    monkeypatch.setattr(signals, "time", network)
    sides = [Signals(Members(host, len(hosts), None, None)) for host in hosts]
    starts_ns = np.zeros((300, len(hosts)), np.int64)
    for trial in starts_ns:
        for network.host in hosts:
            due_ns = sides[network.host].next(0, -AHEAD_NS[network.host]).due_ns - AHEAD_NS[network.host]
            network.now_ns[network.host] = trial[network.host] = max(due_ns, network.now_ns[network.host])
        network.now_ns = [int(trial.max())] * len(hosts)
        for network.host in reversed(hosts):  # host 0 hears all others
            sides[network.host].report(torch.zeros(1, 2, dtype=torch.int64))
    apart_ns = np.ptp(starts_ns, axis=1)[1:]  # before the first nobody knows how long an announcement takes
    assert np.quantile(apart_ns, 0.9) == 0
    assert apart_ns.max() > 100 * MS, "or nothing was lost"
    assert np.median(np.diff(starts_ns.max(1))) < 15 * MS, "there and back, and no more"


@pytest.mark.distributed
@pytest.mark.parametrize(("ahead_ns", "passes", "estimates"), [(0, 30.0, 1), (10**12, 0.0, 1), (10**12, 30.0, 4)])
def test_clocks_are_measured_again_where_they_differ_and_time_has_gone_by(
    ranks2: Ranks, ahead_ns: int, passes: float, estimates: int
) -> None:
    """Three trials; before each so many seconds go by."""
    spec = Spec(Workload.from_sizes([4]), 2, measures_links=False)
    found: list[Any] = ranks2.run(jobs.on_other_clocks, spec, ahead_ns, passes)
    assert [one[3] for one in found] == [estimates] * 2
    began, ended, stamps, _ = found[0]
    assert (stamps > began - 10 * 10**9).all(), "they are of one clock, whatever a host's own reads"
    assert (stamps < ended + 10 * 10**9).all()

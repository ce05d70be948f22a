"""The start between machines, on a network and on clocks that are made of numbers: what the machine does plays no part.

Messages take 5 ms and some more, and one in a hundred is lost and sent again after 200 ms.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import fabric_jobs as jobs
import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.network.fabric.emulation import trials as signals
from penstock.network.fabric.emulation.rendezvous import Members
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.emulation.trials import Signals
from penstock.network.fabric.workload import Workload
from scaffolding.ranks import Ranks

MS = 1_000_000
AHEAD_NS = (0, 90_000 * MS, -40_000 * MS, 7 * MS)
"""By how much each host's clock is ahead of the true time; and host 0's is true."""
TRIALS = 600
TOOK_NS = 20 * MS
"""What the collective takes from when all are there."""


class Network:
    """Stands for `torch.distributed` and for `time`: of the host whose turn it is, with a clock of its own."""

    def __init__(self) -> None:
        self.host = 0
        self.now_ns = [0] * len(AHEAD_NS)  # the true time
        self._draw = np.random.default_rng(0)
        self._under_way: dict[tuple[int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)

    def monotonic_ns(self) -> int:
        return self.now_ns[self.host] + AHEAD_NS[self.host]

    def send(self, tensor: Tensor, to: int, group: object = None) -> None:
        took = 5 * MS + int(self._draw.exponential(0.2 * MS)) + 200 * MS * (self._draw.random() < 0.01)
        self._under_way[self.host, to].append((self.now_ns[self.host] + took, tensor.clone()))

    def recv(self, tensor: Tensor, source: int, group: object = None) -> None:
        came, sent = self._under_way[source, self.host].popleft()
        tensor.copy_(sent)
        self.now_ns[self.host] = max(self.now_ns[self.host], came)

    isend, irecv = send, recv  # what is received was sent before, as one host takes its turn after the other


@pytest.fixture(scope="module")
def starts_ns() -> np.ndarray:
    """When each host begins each trial, in true time."""
    network, hosts = Network(), range(len(AHEAD_NS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "dist", network)
        patch.setattr(signals, "time", network)
        sides = [Signals(Members(host, len(hosts), None, None)) for host in hosts]
        found = np.zeros((TRIALS, len(hosts)), np.int64)
        for trial in range(TRIALS):
            for host in hosts:
                network.host = host
                due_ns = sides[host].next(0, -AHEAD_NS[host]).due_ns - AHEAD_NS[host]
                network.now_ns[host] = found[trial, host] = max(due_ns, network.now_ns[host])
            network.now_ns = [int(found[trial].max()) + TOOK_NS] * len(hosts)
            for host in reversed(hosts):  # host 0 hears all others
                network.host = host
                sides[host].report(torch.zeros(1, 2, dtype=torch.int64))
    return found


def test_nearly_all_trials_begin_at_one_moment_on_every_host(starts_ns: np.ndarray) -> None:
    apart = np.ptp(starts_ns, axis=1)[1:]  # before the first nobody knows how long a word takes
    assert np.quantile(apart, 0.94) == 0, "three words in a hundred trials are late, as they were lost, and no others"
    assert np.quantile(apart, 0.995) > 100 * MS, "or nothing was lost"


def test_what_was_lost_does_not_hold_up_every_trial_after_it(starts_ns: np.ndarray) -> None:
    between = np.diff(starts_ns.max(1)) - TOOK_NS
    assert np.median(between) < 15 * MS, "there and back, and no more"


# -- clocks that differ -----------------------------------------------------------------------------------------------


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

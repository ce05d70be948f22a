"""Trials that met a stall which was asked for are marked, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import made_run

from penstock.network.fabric.results import results
from penstock.network.fabric.samples import Run, stalled_trials
from penstock.network.fabric.views.wording import facts
from penstock.network.fabric.workload import Workload
from penstock.network.parse import parse_link
from penstock.network.switch import columns
from penstock.network.switch.filling import DecisionBuffer, create_tables, stalls
from penstock.network.topology import Topology

MS = 1_000_000
STALL = {"since_ns": 1000 * MS, "length_ns": 50 * MS, "every_ns": 500 * MS, "until_ns": None}
"""The first from 1,500 to 1,550 ms, the second from 2,000 to 2,050."""

IDLE = {"late": dict.fromkeys(("p50", "p99", "worst")), "no_room": 0, "seconds": 9.0, "busy_seconds": 0.0, "links": []}
"""What else a switch counts."""


def _run(*trials: tuple[int, int]) -> Run:
    """Trials of two hosts from one ms to another."""
    run = made_run(len(trials), 2, Workload.from_sizes([400]), switch={**IDLE, "stalls": [STALL]})
    times = np.array(trials, np.int64)[:, :, None, None] * MS
    both = np.broadcast_to(times, (len(trials), 2, 1, 2)).copy()
    both[:, 1, 0, 1] -= 1 * MS  # the second host ends earlier
    return Run(run.record, both[:, 0], both[:, 1])


def test_a_trial_meets_a_stall_that_it_overlaps_and_the_report_names_it() -> None:
    trials = [(900, 950), (1040, 1060), (1400, 1499), (1400, 1501), (1520, 1530), (1549, 1700), (1551, 1700),
              (1560, 2100), (1999, 3000), (2050, 2400)]  # fmt: skip
    run = _run(*trials)
    assert stalled_trials(run) == (3, 4, 5, 7, 8)
    found = results(run)
    assert found["stalled"] == [3, 4, 5, 7, 8]
    assert dict(facts(run, found))["stalls"] == "5 of 10 trials met a requested stall: trials 3, 4, 5, 7, 8"


def test_the_switch_tells_each_stall_once_and_from_when_on_it_is() -> None:
    pytest.importorskip("numba")
    topology = Topology(parse_link("100mbit stall 2ms every 9ms"), {})
    t = create_tables(topology, [0, 0, 0], 5 * MS)
    DecisionBuffer(t, topology)
    assert stalls(t) == {(5 * MS, 2 * MS, 9 * MS)}
    DecisionBuffer(t, Topology(parse_link("100mbit stall 3ms every 9ms"), {}), 1, 70 * MS)
    assert stalls(t) == {(70 * MS, 3 * MS, 9 * MS)}
    DecisionBuffer(t, Topology(parse_link("100mbit"), {}), 2, 80 * MS)
    assert stalls(t) == set()
    assert t.lines[0, columns.OVERTAKES] == 0

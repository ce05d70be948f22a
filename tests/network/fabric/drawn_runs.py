"""Runs whose every start and end is given, so what they must show is known, and series that depend on themselves."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import scipy  # loads its parts when they are asked for
from numpy.typing import ArrayLike

from penstock._base.files import validate
from penstock.network.fabric.samples import Run, RunRecord
from penstock.network.fabric.workload import Transfer, Workload

EPOCH_NS = 1_700_000_000_000_000_000
"""Clocks read such numbers; a float of seconds would round them to 0.2 microseconds."""


def run_of(seconds: ArrayLike, transfers: tuple[Transfer, ...] = (), hosts: int = 4, **record: Any) -> Run:
    """Each trial's transfers one after the other, on all ranks from one moment on.

    Args:
        seconds: of each trial and transfer.
        transfers: by default all-reduces of 1000, 2000, ... bytes.
        record: more of it.
    """
    table = np.atleast_2d(np.asarray(seconds, float))
    transfers = transfers or tuple(Transfer(f"t{i}", 1000 * (i + 1)) for i in range(table.shape[1]))
    workload = record.pop("workload", None) or Workload("drawn", transfers)
    start = np.full((*table.shape, hosts), -1, np.int64)
    end = start.copy()
    now = EPOCH_NS
    for trial, row in enumerate(table):
        for place, took in enumerate(row):
            taking = list(transfers[place].ranks or range(hosts))
            now += round(transfers[place].compute_seconds * 1e9)
            start[trial, place, taking] = now
            now += round(took * 1e9)
            end[trial, place, taking] = now
        now += 1_000_000
    made = {"workload": asdict(workload), "algorithm": "ring", "hosts": hosts, "trials": len(table), "complete": True}
    return Run(record_of(**{**made, **record}), start, end)


def record_of(**entries: Any) -> RunRecord:
    """As run.json is read; a network without some of its entries gets those of one that nothing shapes."""
    if entries.get("network"):
        usual = {"shaper": None, "remarks": [], "link": None, "own": {}, "background": [], "slow": {}}
        entries["network"] = usual | {"hosts": entries["hosts"], "held_back_by": None} | entries["network"]
    return validate(RunRecord, {"workload": asdict(Workload("made", (Transfer("t", 4),))), **entries}, "the record")


def series(draw: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Normal, each with the correlation to the one before it."""
    noise = draw.standard_normal(count + 200)
    noise[1:] *= math.sqrt(1 - correlation**2)
    return scipy.signal.lfilter([1], [1, -correlation], noise)[200:]

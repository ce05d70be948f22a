"""Runs of no network: drawn times, with a heavy tail, a slow rank and outliers, in the folder of a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from network.fabric.drawn_runs import record_of
from penstock.network.fabric.samples import HEAD, RUN, SAMPLES, STEPS, STEPS_HEAD, Run
from penstock.network.fabric.workload import Transfer, Workload

SIZES = (2600, 33024, 131584, 803840)
"""Of the gradients of 784-256-128-64-10 in backward order."""

SLOW_RANK = 2
HOST = {
    "kernel": "6.1.0", "congestion_control": "bbr", "offloads": "tcp-segmentation-offload: on",
    "qdiscs": "qdisc tbf 8001: dev eth0 root rate 100Mbit burst 32Kb lat 50ms",
}  # fmt: skip


def made_workload(sizes: Sequence[int] = SIZES, compute_seconds: float = 1e-3) -> Workload:
    transfers = [Transfer(f"fc{len(sizes) - i}", size, compute_seconds=compute_seconds) for i, size in enumerate(sizes)]
    return Workload("mlp 784-256-128-64-10", tuple(transfers))


def made_run(
    trials: int = 200,
    hosts: int = 4,
    workload: Workload | None = None,
    seed: int = 0,
    *,
    asked: int | None = None,
    slower: float = 1.0,
    steps: bool = True,
    **record: Any,
) -> Run:
    """A ring over a link of 100 Mbit/s and 100 microseconds.

    Args:
        asked: how many trials were to be; more than there are: the run was killed.
        slower: what every time is multiplied by.
        steps: whether rounds were kept.
        record: what replaces entries of the record.
    """
    workload = workload or made_workload()
    draw = np.random.default_rng(seed)
    shape = (trials, len(workload.transfers), hosts)
    start, end = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    rounds = 2 * (hosts - 1)
    rows: list[tuple[int, ...]] = []
    now, slowest = 1e9, 0.0
    for trial in range(trials):
        began = now
        free = now + draw.exponential(20e3, hosts)
        for number, transfer in enumerate(workload.transfers):
            ranks = transfer.ranks or tuple(range(hosts))
            into = np.array([free[rank] for rank in ranks]) + transfer.compute_seconds * 1e9
            into[[rank == SLOW_RANK for rank in ranks]] += draw.exponential(200e3) if SLOW_RANK in ranks else 0
            ideal = rounds * 100e3 + transfer.bytes * 8 / 0.1 * rounds / hosts
            took = ideal * slower * 1.05 * draw.lognormal(0, 0.04)
            took += ideal * draw.exponential(3) if draw.random() < 0.01 else 0.0
            out = into.max() + took * (1 - 0.03 * draw.random(len(ranks)))
            start[trial, number, list(ranks)], end[trial, number, list(ranks)] = into, out
            free[list(ranks)] = out
        now = float(free.max())
        if now - began > slowest:
            slowest = now - began
            rows += _rounds(trial, start[trial], end[trial], rounds, draw) if steps else []
        now += 5e6
    made = _record(workload, hosts, trials if asked is None else asked, trials)
    return Run(record_of(**{**made, **record}), start, end, np.array(rows, np.int64).reshape(-1, len(STEPS_HEAD)))


def write_run(run: Run, folder: Path) -> Path:
    """As a run writes its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN).write_text(json.dumps(asdict(run.record)))
    rows = [
        (*place, run.start_ns[place], run.end_ns[place])
        for place in np.ndindex(run.start_ns.shape)
        if run.end_ns[place] >= 0
    ]
    for name, head, lines in ((SAMPLES, HEAD, rows), (STEPS, STEPS_HEAD, run.rounds)):
        text = [",".join(head), *(",".join(str(int(value)) for value in line) for line in lines)]
        (folder / name).write_text("\n".join(text) + "\n")
    return folder


def _rounds(trial: int, start: Any, end: Any, rounds: int, draw: np.random.Generator) -> list[tuple[int, ...]]:
    rows = []
    for (number, rank), ended in np.ndenumerate(end):
        if ended < 0:
            continue
        began = start[number].max()
        edges = np.cumsum(draw.dirichlet(np.full(rounds, 60.0))) * (ended - began) + began
        for place, (first, last) in enumerate(zip([start[number, rank], *edges], edges, strict=False)):
            rows.append((trial, number, rank, place, int(first), int(last)))
    return rows


def _record(workload: Workload, hosts: int, asked: int, trials: int) -> dict[str, Any]:
    links = [{"from": a, "to": b, "latency_seconds": 100e-6, "bytes_per_second": 12.5e6} for a, b in ((0, 1), (1, 0))]
    return {
        "version": 1,
        "workload": asdict(workload),
        "algorithm": "ring",
        "backend": "gloo",
        "hosts": hosts,
        "trials": asked,
        "warmup": 5,
        "overlap": False,
        "seed": 0,
        "link": "100mbit",
        "links": links,
        "network": {"shaper": "tbf", "link": "100mbit", "rates": {way: [12.5e6] * hosts for way in ("up", "down")}},
        "clock": [{"offset_ns": 1200 * rank, "uncertainty_ns": 900 if rank else 0} for rank in range(hosts)],
        "cpu": [{"cpu_seconds": 1.5, "wall_seconds": 20.0, "steal": 0.0, "involuntary_switches": 12}] * hosts,
        "environment": [{"host": f"host{rank}", **HOST} for rank in range(hosts)],
        "machine_cores": 2,
        "shared_machine": True,
        "complete": asked <= trials,
        "missing": "" if asked <= trials else f"rank 2 left in trial {trials}",
    }

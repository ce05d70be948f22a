"""Compute a run's results, the JSON object of `penstock fabric --json`, from its samples and its record.

A trial's value is the maximum over its ranks, as in nccl-tests. Bandwidths are those of the median completion time; 1
GBps is 1e9 bytes per second. Figures that the samples cannot bound are None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from penstock.network.fabric.algorithms import busbw_factor
from penstock.network.fabric.alpha_beta import forecasts, network_seconds, record_links
from penstock.network.fabric.ports import lower_bound_seconds, shaped_ports
from penstock.network.fabric.samples import (
    Run,
    RunRecord,
    TransferTimes,
    computed_step,
    measured_step,
    rate_key,
    stalled_trials,
)
from penstock.network.fabric.statistics import Summary, effective_counts, min_samples, outliers
from penstock.network.fabric.workload import groups


def results(run: Run) -> dict[str, Any]:
    """Return all results as one JSON object; for a run that was killed, those of its complete trials.

    `time_s`, `arrival_skew_s` and `transfer_s` (see `TransferTimes`) hold min, p50, p90, p99, p999, max and mean, next
    to the 95% confidence intervals of the mean and of the percentiles. `ideal_percent` is 100 times the lower bound for
    any algorithm on these links (see `ports`) over the median; None if that is unknown. `step` has the same figures
    for the whole trial. `stalled` lists the trials that a requested stall hit. `groups` has the same figures for
    similar transfers together (see `groups`), and under `times` how often a step has them; tables and plots show
    these. Each time is one transfer's, and percentiles are taken over all of them in all trials. `model` holds what
    `penstock fabric predict` makes of each collective with enough sizes, for its largest size.
    """
    record, workload, requested, trials = run.record, run.record.workload, run.record.trials, len(run.start_ns)
    links = [] if record.links_changed else record_links(record)
    ports = shaped_ports(record, links)
    bounds = [  # None if the links changed during the run, or are not known
        lower_bound_seconds(links, t.collective, timing.ranks, t.bytes, t.shares, ports, record.iterations)
        for t, timing in zip(workload.transfers, run.times, strict=True)
    ]
    transfers = [_entry(run, transfer.name, (index,), bounds) for index, transfer in enumerate(workload.transfers)]
    group_entries = [
        (_entry(run, group.name, group.indices, bounds) if len(group.indices) > 1 else transfers[group.indices[0]])
        | {"times": len(group.indices)}
        for group in groups(workload)
    ]
    # A killed run could not write down what is missing.
    complete = record.complete and trials >= requested
    missing = [record.missing] if record.missing else []
    if not complete and trials < requested:
        missing.append(f"{requested - trials:,} of {requested:,} trials")
    entries = asdict(record)
    result = {
        "version": 1,
        "workload": workload.name,
        "hosts": record.hosts,
        "trials": trials,
        "trials_asked": requested,
        "complete": complete,
        "missing": "; ".join(missing),
        "transfers": transfers,
        "groups": group_entries,
        "step": _step(run, transfers),
        "stalled": list(stalled_trials(run)),
        "cpu": saturation(record, trials, _network_percent(record, transfers)),
        "links": list(record.links),
        "environment": {"hosts": entries["environment"], **{key: entries[key] for key in _RECORD_KEYS}},
    }
    return result | {"model": list(forecasts(record, result))}


_RECORD_KEYS = (
    "algorithm", "backend", "link", "seed", "overlap", "iterations", "warmup", "steady", "clock", "network", "switch",
    "happened",
)  # fmt: skip


def _entry(run: Run, name: str, indices: Sequence[int], bounds: Sequence[float | None]) -> dict[str, Any]:
    """Describe one transfer, or several similar ones: their times are pooled, and the rest is the first transfer's."""
    transfers, times = [run.record.workload.transfers[index] for index in indices], [run.times[n] for n in indices]
    first, limits = transfers[0], [bounds[index] for index in indices]
    # Of similar transfers between different ranks, the mean.
    bound = None if None in limits else sum(filter(None, limits)) / len(limits)
    completion = np.stack([timing.completion for timing in times], axis=1)
    summary = Summary.from_samples(completion)
    transfer_summary = Summary.from_samples(np.stack([timing.transfer for timing in times], axis=1))
    median = (transfer_summary if rate_key(first.collective) == "transfer_s" else summary).p50
    per_rank = _per_rank(times)
    slowest = max(per_rank, key=lambda entry: int(entry["trials_slowest"]), default=None)
    factor = busbw_factor(first.collective, len(times[0].ranks), first.shares)
    return {
        "name": name,
        "bytes": first.bytes,
        "collective": first.collective,
        "algorithm": run.record.algorithm_for(indices[0]),
        "kind": first.kind,
        "shares": list(first.shares),
        "ranks": list(dict.fromkeys(rank for timing in times for rank in timing.ranks)),
        "trials": summary.count,
        "effective_trials": summary.effective,
        "compute_s": sum(transfer.compute_seconds for transfer in transfers) / len(transfers),
        **_times("time", summary),
        **_times("arrival_skew", Summary.from_samples(np.stack([timing.arrival_skew for timing in times], axis=1))),
        **_times("transfer", transfer_summary),
        **_rates(first.bytes, first.bytes * factor, median, bound),
        "outliers": sorted({int(index) // len(times) for index in outliers(completion)}),
        "per_rank": per_rank,
        "slowest_rank": slowest and {key: slowest[key] for key in ("rank", "trials_slowest")},
    }


ABOVE_IDEAL = 105.0
"""A percentage of ideal above which the figure must be wrong: links are measured to within 5%."""


def _network_percent(record: RunRecord, transfers: Sequence[dict[str, Any]]) -> float | None:
    """Return the least percentage of any transfer's median that the network alone accounts for.

    None if the links changed during the run or their measurements must be wrong; 0 if nothing is known about them. This
    uses the run's own algorithm: a bound for any algorithm has the latency of one round, while a ring has many rounds.
    """
    if record.links_changed or any((transfer["ideal_percent"] or 0.0) > ABOVE_IDEAL for transfer in transfers):
        return None
    medians = [transfer[rate_key(transfer["collective"])]["p50"] for transfer in transfers]
    pairs = zip(transfers, medians, strict=True)
    return min(100 * network_seconds(record, transfer) / median if median else 0.0 for transfer, median in pairs)


def _times(name: str, summary: Summary) -> dict[str, Any]:
    """Return the figures under `<name>_s`, and their intervals under keys with the same prefix, or none for "time"."""
    prefix = "" if name == "time" else f"{name}_"
    return {
        f"{name}_s": summary.figures,
        f"{prefix}mean_interval": summary.mean_interval and list(summary.mean_interval),
        f"{prefix}intervals": {key: interval and list(interval) for key, interval in summary.intervals.items()},
    }


def _rates(size: int, bus_bytes: float, median: float | None, bound: float | None) -> dict[str, float | None]:
    return {
        "algbw_GBps": size / median / 1e9 if median else None,
        "busbw_GBps": bus_bytes / median / 1e9 if median else None,
        "bound_s": bound,
        "ideal_percent": 100 * bound / median if bound is not None and median else None,
    }


def _per_rank(times: Sequence[TransferTimes]) -> list[dict[str, Any]]:
    """Describe each rank that takes part in any of the transfers: its quantiles, None if there are too few trials, and
    in how many trials it was the slowest, and the latest; empty without trials."""
    if not len(times[0].durations):
        return []
    slowest = [timing.durations.argmax(1) for timing in times]
    latest = [timing.late.argmax(1) for timing in times]
    rows: list[dict[str, Any]] = []
    durations = []
    for rank in dict.fromkeys(rank for timing in times for rank in timing.ranks):
        indices = [(n, timing.ranks.index(rank)) for n, timing in enumerate(times) if rank in timing.ranks]
        durations.append(np.stack([times[n].durations[:, index] for n, index in indices], axis=1))
        counts = [sum(int((extremes[n] == index).sum()) for n, index in indices) for extremes in (slowest, latest)]
        rows.append({"rank": rank, "p50": None, "p99": None, "trials_slowest": counts[0], "trials_latest": counts[1]})
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        if min(effective_counts(rank_durations.mean(1), (q,))[0] for rank_durations in durations) >= min_samples(q):
            for row, rank_durations in zip(rows, durations, strict=True):
                row[name] = float(np.quantile(rank_durations, q))
    return rows


def _step(run: Run, transfers: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe the whole step as measured and, computed from its transfers' times, with and without overlap."""
    workload, hosts, overlap = run.record.workload, run.record.hosts, run.record.overlap

    def if_transfers_took(seconds: Sequence[float], *, overlap: bool) -> float:
        return float(computed_step(workload, [np.array([value]) for value in seconds], hosts, overlap=overlap)[0])

    measured = measured_step(run)
    compute = if_transfers_took([0.0] * len(transfers), overlap=False)
    other_overlap = measured  # without compute, there is nothing to overlap
    if compute:
        other_overlap = computed_step(workload, [timing.transfer for timing in run.times], hosts, overlap=not overlap)
    summary = Summary.from_samples(measured)
    medians = {overlap: summary.p50, not overlap: Summary.from_samples(other_overlap).p50}
    size = sum(transfer.bytes for transfer in workload.transfers)
    bus = sum(t["bytes"] * busbw_factor(t["collective"], len(t["ranks"]), t["shares"]) for t in transfers)
    bounds, kinds = [t["bound_s"] for t in transfers], {t["collective"] for t in transfers}
    bound = None if None in bounds else if_transfers_took(bounds, overlap=overlap)
    return {
        "name": "step",
        "bytes": size,
        "collective": kinds.pop() if len(kinds) == 1 else None,
        "algorithm": run.record.algorithm,
        "trials": len(measured),
        **_times("time", summary),
        **_rates(size, bus, summary.p50, bound),
        "overlap": overlap,
        "compute_s": compute,
        "without_overlap_s": medians[False],
        "with_overlap_s": medians[True],
        "outliers": [int(trial) for trial in outliers(measured)],
    }


# -- the processors ----------------------------------------------------------------------------------------------------

_BUSY, _STOLEN, _TAIL = 0.85, 0.05, 0.01
_NETWORK = 80.0
"""If the network alone accounts for this percentage of the times, it is the limit, however busy the processors are."""


def saturation(record: RunRecord, trials: int, network_percent: float | None = 0.0) -> dict[str, Any]:
    """Judge from processor usage whether a run was limited by its processors, rather than by the network.

    Args:
        record: the run's record.
        trials: the number of trials run in this time.
        network_percent: the least percentage of any transfer's time that its algorithm would take on these links with
            free processors; close to 100, the processors are no limit. None if unknown, in which case neither is
            blamed.

    Returns:
        `saturated`: it was, or may have been if that is unknown; figures about the network are then not valid.
        `scheduler_tails`: ranks were preempted often enough to account for the slowest 1% of the trials.
        `utilization`: of the busiest machine, 0..1; None if unknown. `text`: for people; empty if nothing is known.
    """
    if not (cpus := record.cpu):
        return {"saturated": False, "scheduler_tails": False, "utilization": None, "text": ""}
    count = record.machine_cores or 1
    if shared := record.shared_machine:
        own_share = sum(cpu["cpu_seconds"] for cpu in cpus) / (max(cpu["wall_seconds"] for cpu in cpus) * count)
        busy = max(own_share, *(cpu.get("busy") or 0.0 for cpu in cpus))
        machine_text = f"{len(cpus)} hosts share {count} cores"
    else:
        cores = [host.get("cores") or 0 for host in record.environment]
        cores = cores if all(cores) and len(cores) == len(cpus) else [count] * len(cpus)
        # These are the processes' own shares; their machine also runs the kernel's network stack, and other processes.
        shares = [cpu["cpu_seconds"] / (cpu["wall_seconds"] * n) for cpu, n in zip(cpus, cores, strict=True)]
        machines = [max(share, cpu.get("busy") or 0.0) for share, cpu in zip(shares, cpus, strict=True)]
        busy = max(machines)
        machine_text = f"rank {machines.index(busy)} is the busiest"
    stolen = max(cpu.get("steal") or 0.0 for cpu in cpus)
    switches = sum(cpu.get("involuntary_switches") or 0 for cpu in cpus)
    overloaded = busy >= _BUSY or stolen >= _STOLEN
    saturated = overloaded and (network_percent is None or network_percent < _NETWORK)
    tails = (overloaded or (shared and len(cpus) > count)) and switches >= _TAIL * max(trials, 1)
    parts = [f"{machine_text}, {busy:.0%} busy"]
    if stolen >= _STOLEN:
        parts.append(f"{stolen:.0%} taken by other virtual machines")
    if overloaded and network_percent is None:
        parts.append("it is not known whether they or the network set the times")
    elif saturated:
        parts.append("the processors are the limit, not the network")
    elif overloaded:
        parts.append(
            f"yet the network alone accounts for at least {min(network_percent or 0.0, 100):.0f}% of the times"
        )
    if tails:
        parts.append(f"{switches:,} involuntary switches in {trials:,} trials: the scheduler may cause the tail")
    return {"saturated": saturated, "scheduler_tails": tails, "utilization": busy, "text": "; ".join(parts)}

"""What a run has shown: the JSON object of `penstock fabric --json`, from the samples and the record of the run.

A trial's value is the maximum over its ranks, as nccl-tests has it; bandwidths are those of the median completion time,
1 GBps is 1e9 bytes a second. What the samples cannot bound is None.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.fabric.bounds import lower_bound_seconds
from penstock.fabric.dependence import effective_counts
from penstock.fabric.forecast import forecasts
from penstock.fabric.models import LinkFit, busbw_factor, record_links
from penstock.fabric.samples import Run
from penstock.fabric.stalls import stalled
from penstock.fabric.statistics import Saturation, Summary, fewest, log_histogram, outliers, saturation
from penstock.fabric.trials import TransferTimes, algorithm_of, computed_step, measured_step, rate_key
from penstock.fabric.workload import Transfer, Workload


def results(run: Run) -> dict[str, Any]:
    """All of it as one JSON object; of a run that was killed, of the trials that are whole.

    `time_s`, `arrival_skew_s` and `transfer_s` (see `trials`) have min, p50, p90, p99, p999, max and mean, and beside
    them are the mean's 95 % interval and those of the percentiles. `ideal_percent` is the least that any algorithm
    can take on the measured links (see `bounds`), over the median.
    `step` has the same figures of the whole trial; `stalled` are the trials that met a stall which was asked for.
    `model` is what `penstock fabric predict` makes of each collective that has sizes enough, of its largest.
    """
    record = run.record
    workload = Workload.from_dict(record["workload"])
    hosts, trials = int(record["hosts"]), len(run.start_ns)
    times = [TransferTimes.of(run, workload, place) for place in range(len(workload.transfers))]
    links = record_links(record)
    transfers = [
        _transfer(transfer, algorithm_of(record, place), one, links)
        for place, (transfer, one) in enumerate(zip(workload.transfers, times, strict=True))
    ]
    step = _step(run, workload, times, transfers)
    cpu = _cpu(record, trials, min((one["ideal_percent"] or 0.0 for one in transfers), default=0.0))
    made = {
        "version": 1,
        "workload": workload.name,
        "hosts": hosts,
        "trials": trials,
        "trials_asked": record.get("trials"),
        **_completeness(record, trials),
        "transfers": transfers,
        "step": step,
        "stalled": list(stalled(run)),
        "cpu": {
            "saturated": cpu.saturated,
            "scheduler_tails": cpu.scheduler_tails,
            "utilization": cpu.utilization,
            "text": cpu.text,
        },
        "links": record.get("links") or [],
        "environment": {
            "hosts": record.get("environment"),
            **{key: record.get(key) for key in ("algorithm", "backend", "link", "seed", "overlap", "iterations")},
            **{key: record.get(key) for key in ("warmup", "steady", "clock", "network", "switch", "happened")},
        },
    }
    return made | {"model": [one.to_dict() for one in forecasts(record, made)]}


def _completeness(record: dict[str, Any], trials: int) -> dict[str, Any]:
    """Whether all trials are there, and in words what is missing: a run that was killed could not write it down."""
    asked = int(record.get("trials") or 0)
    complete = bool(record.get("complete", False)) and trials >= asked
    texts = [str(record["missing"])] if record.get("missing") else []
    if not complete and trials < asked:
        texts.append(f"{asked - trials:,} of {asked:,} trials")
    return {"complete": complete, "missing": "; ".join(texts)}


def _transfer(
    transfer: Transfer, algorithm: str, times: TransferTimes, links: list[tuple[tuple[int, int], LinkFit]]
) -> dict[str, Any]:
    ranks = len(times.ranks)
    summary = Summary.of(times.completion)
    own = [one for one in links if set(one[0]) <= set(times.ranks)] or links
    bound = lower_bound_seconds(own, transfer.collective, times.ranks, transfer.bytes, transfer.shares)
    waiting = Summary.of(times.transfer)
    median = (waiting if rate_key(transfer.collective) == "transfer_s" else summary).p50
    return {
        "name": transfer.name,
        "bytes": transfer.bytes,
        "collective": transfer.collective,
        "algorithm": algorithm,
        "kind": transfer.kind,
        "shares": list(transfer.shares),
        "ranks": list(times.ranks),
        "trials": summary.count,
        "effective_trials": summary.effective,
        "compute_s": transfer.compute_seconds,
        **_times("time", summary),
        **_times("arrival_skew", Summary.of(times.arrival_skew)),
        **_times("transfer", waiting),
        **_rates(transfer.bytes, transfer.bytes * busbw_factor(transfer.collective, ranks, transfer.shares), median),
        "bound_s": bound,
        "ideal_percent": 100 * bound / median if bound is not None and median else None,
        "outliers": [int(trial) for trial in outliers(times.completion)],
        "per_rank": _per_rank(times),
        "slowest_rank": _slowest(times),
    }


def _times(name: str, summary: Summary) -> dict[str, Any]:
    """The figures under `name`_s; those of `time` have their intervals beside them, others inside."""
    intervals = {
        "mean_interval": summary.mean_interval and list(summary.mean_interval),
        "intervals": {key: found and list(found) for key, found in summary.intervals.items()},
    }
    if name == "time":
        return {"time_s": summary.to_dict(), **intervals}
    return {f"{name}_s": summary.to_dict(), **{f"{name}_{key}": found for key, found in intervals.items()}}


def _rates(size: int, bus_bytes: float, median: float | None) -> dict[str, float | None]:
    rates = (None, None) if not median else (size / median / 1e9, bus_bytes / median / 1e9)
    return dict(zip(("algbw_GBps", "busbw_GBps"), rates, strict=True))


def _per_rank(times: TransferTimes) -> list[dict[str, Any]]:
    trials = len(times.durations)
    if not trials:
        return []
    slowest = np.bincount(times.durations.argmax(1), minlength=len(times.ranks))
    latest = np.bincount(times.late.argmax(1), minlength=len(times.ranks))
    columns = {"p50": _quantiles(times.durations, 0.5), "p99": _quantiles(times.durations, 0.99)}
    return [
        {
            "rank": rank,
            **{name: None if column is None else float(column[place]) for name, column in columns.items()},
            "trials_slowest": int(slowest[place]),
            "trials_latest": int(latest[place]),
        }
        for place, rank in enumerate(times.ranks)
    ]


def _quantiles(durations: NDArray[np.float64], q: float) -> NDArray[np.float64] | None:
    """Of each rank; None where there are too few trials."""
    worth = min((effective_counts(one, (q,))[0] for one in durations.T), default=0.0)
    return None if worth < fewest(q) else np.quantile(durations, q, axis=0)


def _slowest(times: TransferTimes) -> dict[str, Any] | None:
    """The rank that was the slowest in most trials, with the histogram of its durations; None without trials."""
    if not len(times.durations):
        return None
    counts = np.bincount(times.durations.argmax(1), minlength=len(times.ranks))
    place = int(counts.argmax())
    edges, histogram = log_histogram(times.durations[:, place])
    return {
        "rank": times.ranks[place],
        "trials_slowest": int(counts[place]),
        "histogram": {"edges_s": edges, "counts": histogram},
    }


def _step(run: Run, workload: Workload, times: list[TransferTimes], transfers: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole step: as it was measured, and, from what its transfers took, as it is with overlap or without."""
    overlap = bool(run.record.get("overlap", False))
    measured = measured_step(run, workload)
    hosts = int(run.record["hosts"])
    compute = _if_transfers_took(workload, [0.0] * len(transfers), hosts)
    other = measured  # where nothing is computed, there is nothing to overlap with
    if compute:
        other = computed_step(workload, [one.transfer for one in times], hosts, overlap=not overlap)
    summary = Summary.of(measured)
    medians = {overlap: summary.p50, not overlap: Summary.of(other).p50}
    size = sum(transfer.bytes for transfer in workload.transfers)
    bus = sum(one["bytes"] * busbw_factor(one["collective"], len(one["ranks"]), one["shares"]) for one in transfers)
    bounds = [one["bound_s"] for one in transfers]
    bound = None if None in bounds else _if_transfers_took(workload, bounds, hosts, overlap=overlap)
    return {
        "name": "step",
        "bytes": size,
        "collective": _common(transfers, "collective"),
        "algorithm": str(run.record.get("algorithm", "")),
        "trials": len(measured),
        **_times("time", summary),
        **_rates(size, bus, summary.p50),
        "bound_s": bound,
        "ideal_percent": 100 * bound / summary.p50 if bound is not None and summary.p50 else None,
        "overlap": overlap,
        "compute_s": compute,
        "without_overlap_s": medians[False],
        "with_overlap_s": medians[True],
        "outliers": [int(trial) for trial in outliers(measured)],
    }


def _if_transfers_took(workload: Workload, seconds: list[float], hosts: int, *, overlap: bool = False) -> float:
    """The step's seconds."""
    return float(computed_step(workload, [np.array([one]) for one in seconds], hosts, overlap=overlap)[0])


def _common(transfers: list[dict[str, Any]], key: str) -> str | None:
    """What all of them have; None where they differ."""
    found = {one[key] for one in transfers}
    return found.pop() if len(found) == 1 else None


def _cpu(record: dict[str, Any], trials: int, ideal_percent: float) -> Saturation:
    shared = bool(record.get("shared_machine", False))
    hosts = record.get("environment") or []
    cores = [int(host.get("cores") or 0) for host in hosts if isinstance(host, dict)]
    return saturation(
        record.get("cpu") or [],
        shared_machine=shared,
        machine_cores=int(record.get("machine_cores") or 1),
        trials=trials,
        cores=cores if all(cores) else [],
        ideal_percent=ideal_percent,
    )

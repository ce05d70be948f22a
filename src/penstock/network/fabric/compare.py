"""Compare two runs: how much each transfer differs, and whether chance alone could explain the difference.

A test returns its p-value: how likely series that do not differ are as far apart (two-sided). Tests that assume
independence find differences between a run and itself, because consecutive trials depend on each other. Each test here
therefore takes the number of independent samples into account (`correlation_time`), by inflating the variance or by
counting fewer samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock.network.fabric.samples import Run, measured_step, stalled_trials
from penstock.network.fabric.statistics import CONFIDENCE, Interval, Summary, correlation_time, min_samples, scipy
from penstock.network.fabric.workload import Group, groups

Samples = NDArray[np.float64]

LEVEL = 0.05
MIN_SAMPLES = 8
"""The fewest samples per run for which the normal approximation holds."""


def compare(a: Run, b: Run) -> dict[str, Any]:
    """Compare two runs transfer by transfer, matching them by name, size and collective.

    The result describes these two runs only: it includes anything else that changed between them, such as the time of
    day or other tenants of the network. Several alternating runs of each kind are stronger evidence.

    Returns what `penstock fabric compare --json` prints, besides the warnings:
        transfers: those that both runs have, in A's order, and step: the whole step, if both runs have the same
            transfers and hosts; else None. See `_compare`.
        only_in_a, only_in_b: the names of the other transfers.
        other_settings: other differences between the runs, by name: (in A, in B).
        differs: whether any transfer, or the step, differs.

    Raises:
        ArgumentError: the runs have no transfer in common.
    """
    loads = a.record.workload, b.record.workload
    keys: list[dict[tuple[str, int, str, str], Group]] = []  # what identifies a group in both runs
    for load in loads:
        firsts = [(load.transfers[group.indices[0]], group) for group in groups(load)]
        keys.append({(group.name, first.bytes, first.collective, first.kind): group for first, group in firsts})
    common = [key for key in keys[0] if key in keys[1]]
    if not common:
        names = [
            ", ".join(f"{name} of {size} bytes ({collective})" for name, size, collective, _ in list(by_key)[:3])
            for by_key in keys
        ]
        raise ArgumentError(
            f"the runs have no transfer in common: A has {names[0]}, B has {names[1]}; compare runs of the same "
            "workload"
        )
    rows = []
    for key in common:
        pair = keys[0][key], keys[1][key]
        series = [  # [trial, transfer]
            np.stack([run.times[index].completion for index in group.indices], axis=1)
            for run, group in zip((a, b), pair, strict=True)
        ]
        algorithms = a.record.algorithm_for(pair[0].indices[0]), b.record.algorithm_for(pair[1].indices[0])
        rows.append(_compare(*key[:3], algorithms, series))
    same_transfers = keys[0].keys() == keys[1].keys() and len(loads[0].transfers) == len(loads[1].transfers)
    compares_step = same_transfers and a.record.hosts == b.record.hosts
    if compares_step:
        series = [measured_step(run)[:, None] for run in (a, b)]
        requested = (a.record.algorithm, b.record.algorithm)
        rows.append(_compare("step", sum(transfer.bytes for transfer in loads[0].transfers), "all", requested, series))
    _judge(rows)
    in_a, in_b = _settings(a), _settings(b)
    return {
        "transfers": rows[: len(common)],
        "step": rows[-1] if compares_step else None,
        "only_in_a": [name for name, *_ in keys[0] if (name, *_) not in keys[1]],
        "only_in_b": [name for name, *_ in keys[1] if (name, *_) not in keys[0]],
        "other_settings": {key: (in_a[key], in_b[key]) for key in in_a if in_a[key] != in_b.get(key, in_a[key])},
        "differs": any(entry["verdict"] == "differs" for entry in rows),
    }


def _compare(
    name: str, size: int, collective: str, algorithms: tuple[str, str], series: Sequence[Samples]
) -> dict[str, Any]:
    """Describe how the completion times of one transfer, or of the whole step, differ between run A and run B.

    For a group of similar transfers (see `groups`), percentiles cover all of them, and the tests use each trial's
    mean. Without enough samples, a figure is None.

    Returns, besides what was given:
        trials, p50_s, p99_s: for A and for B.
        ratio: how many times as long B takes: the median of the ratios of every sample of B to every sample of A
            (Hodges and Lehmann). Half of the ratios lie above it; it is not exactly the ratio of the medians.
        ratio_interval: its 95% confidence interval, not corrected for the number of transfers.
        p_values: of the tests of `median` (Mann-Whitney), `shape` (Kolmogorov-Smirnov) and `tail` (Fisher's exact test
            on the slowest 1%, or 10%), which `_judge` corrects; it also adds a `verdict`.
    """
    summaries = [Summary.from_samples(samples) for samples in series]
    entry: dict[str, Any] = {"name": name, "bytes": size, "collective": collective, "algorithms": algorithms}
    entry |= {"trials": [s.count for s in summaries], "p50_s": [s.p50 for s in summaries]}
    entry |= {"p99_s": [s.figures["p99"] for s in summaries], "p_values": dict.fromkeys(("median", "shape", "tail"))}
    entry |= {"ratio": None, "ratio_interval": None}
    if min(entry["trials"]) < MIN_SAMPLES:
        return entry
    a, b = (samples.mean(1) for samples in series)
    times = correlation_time(a), correlation_time(b)
    effective = len(a) / times[0], len(b) / times[1]
    # Dependence between samples increases the variance of a difference by this factor.
    inflation = sum((times[0] / len(a), times[1] / len(b))) / (1 / len(a) + 1 / len(b))
    entry["p_values"] = {
        "median": mann_whitney(a, b, inflation),
        "shape": kolmogorov_smirnov(a, b, effective),
        "tail": next((tails(a, b, q) for q in (0.99, 0.9) if min(effective) >= min_samples(q)), None),
    }
    # Ratios of times are differences of their logarithms. The floor is there because a clock may measure 0.
    middle, (low, high) = shift(np.log(np.maximum(a, 1e-9)), np.log(np.maximum(b, 1e-9)), inflation)
    return {**entry, "ratio": math.exp(middle), "ratio_interval": (math.exp(low), math.exp(high))}


def _judge(rows: Sequence[dict[str, Any]]) -> None:
    """Correct p-values with Holm's method over all tests. Add a verdict, "differs" if any is below 5%, and in
    `differs_in` which."""
    tests = [(row["p_values"], name) for row in rows for name, p in row["p_values"].items() if p is not None]
    corrected = holm([ps[name] for ps, name in tests])
    for (ps, name), p in zip(tests, corrected, strict=True):
        ps[name] = p
    for row in rows:
        ps = {name: p for name, p in row["p_values"].items() if p is not None}
        row["differs_in"] = [name for name, p in ps.items() if p < LEVEL]
        row["verdict"] = "differs" if row["differs_in"] else "no difference shown" if ps else "too few samples"


_RECORD_KEYS = (
    "algorithm", "backend", "hosts", "link", "overlap", "seed", "machine_cores", "warmup", "iterations"
)  # fmt: skip
_HOST_KEYS = ("kernel", "torch", "congestion_control", "interface")
_NETWORK_KEYS = ("own", "background", "slow", "shaper", "mtu")


def _settings(run: Run) -> dict[str, Any]:
    """Return a run's settings, and the properties that all of its hosts share; None means not requested.

    `scenario` lists the events that took place.
    """
    record, workload = run.record, run.record.workload
    network: Mapping[str, Any] = record.network or {}
    settings: dict[str, Any] = {key: getattr(record, key) for key in _RECORD_KEYS}
    settings |= {"dtype": workload.dtype or None, "op": workload.op, "compute_seconds": workload.compute_seconds}
    for transfer in workload.transfers:
        settings |= {f"{key} of {transfer.name}": list(getattr(transfer, key)) or None for key in ("shares", "ranks")}
        settings["compute_seconds"] += sum(transfer.compute_by_rank) or transfer.compute_seconds
    settings |= {key: network.get(key) or None for key in _NETWORK_KEYS}
    settings["scenario"] = [event.text for event in record.happened] or None
    for key in _HOST_KEYS:
        values = {host.get(key) for host in record.environment}
        settings[key] = values.pop() if len(values) == 1 else None
    return {**settings, "stalled_trials": len(stalled_trials(run))}


# -- tests of two series, by scipy where it can ------------------------------------------------------------------------


def mann_whitney(a: Samples, b: Samples, inflation: float = 1.0) -> float:
    """Test by Mann and Whitney's U: the number of pairs in which the sample of `a` is larger, ties counting half.

    The p-value is the normal approximation's. The variance is corrected for ties and the statistic for continuity (H.
    Mann and D. Whitney, 1947; Lehmann, Nonparametrics, 1.5), as in scipy's test, which cannot inflate the variance.
    Valid from 8 samples per series.
    """
    stats, special = scipy()
    u = float(stats.rankdata(np.concatenate([a, b]))[: len(a)].sum()) - len(a) * (len(a) + 1) / 2
    variance = _variance(a, b) * inflation
    if variance <= 0:
        return 1.0
    z = max(abs(u - len(a) * len(b) / 2) - 0.5, 0) / math.sqrt(variance)
    return 2 * float(special.ndtr(-z))


def _variance(a: Samples, b: Samples) -> float:
    """Return the variance of U if nothing differs."""
    (stats, _), m, n = scipy(), len(a), len(b)
    return m * n / 12 * (m + n + 1) * float(stats.tiecorrect(stats.rankdata(np.concatenate([a, b]))))


def kolmogorov_smirnov(a: Samples, b: Samples, effective: tuple[float, float] | None = None) -> float:
    """Test by the largest distance between the distribution functions.

    The test detects differences in shape, but hardly any that affect only one trial in a hundred; `tails` detects
    those. `effective`: how many independent samples each series is worth; None: all.
    """
    stats, _ = scipy()
    m, n = effective or (len(a), len(b))
    distance = float(stats.ks_2samp(a, b, method="asymp").statistic)
    return float(stats.kstwo.sf(distance, round(m * n / (m + n))))  # as in scipy's test, which takes no `effective`


def tails(a: Samples, b: Samples, q: float) -> float:
    """Test whether one series has more than its share of the slowest samples of both, with Fisher's exact test.

    Consecutive slow samples are one event and count once.
    """
    slowest = [samples > float(np.quantile(np.concatenate([a, b]), q)) for samples in (a, b)]
    slow = [int(flags[:1].sum() + (flags[1:] & ~flags[:-1]).sum()) for flags in slowest]  # runs of True
    return float(scipy()[0].fisher_exact([slow, [len(a) - slow[0], len(b) - slow[1]]]).pvalue)


def shift(a: Samples, b: Samples, inflation: float = 1.0) -> tuple[float, Interval]:
    """Return how much larger b's samples are than a's, with the 95% confidence interval.

    The shift is the median of all pairwise differences (Hodges and Lehmann, 1963). The interval contains the shifts
    that `mann_whitney` does not reject.
    """
    a, b = np.sort(a), np.sort(b)
    pairs = len(a) * len(b)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(_variance(a, b) * inflation)
    low = max(math.floor(pairs / 2 - half), 0)  # counted from 0
    middle = (_difference(a, b, (pairs - 1) // 2) + _difference(a, b, pairs // 2)) / 2
    return middle, (_difference(a, b, low), _difference(a, b, pairs - 1 - low))


def _difference(a: Samples, b: Samples, index: int) -> float:
    """Return the difference b - a at an index of all differences sorted, by bisecting on its value."""
    low, high = float(b[0] - a[-1]), float(b[-1] - a[0])
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if int(np.searchsorted(b, a + middle, "right").sum()) > index:
            high = middle
        else:
            low = middle
    return low if int(np.searchsorted(b, a + low, "right").sum()) > index else high


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests with Holm's method.

    If nothing differs, the chance that any corrected p-value falls below a level is at most that level (S. Holm, A
    simple sequentially rejective multiple test procedure, 1979).
    """
    values, order = np.asarray(ps, float), np.argsort(ps)
    corrected = np.empty(len(values))
    corrected[order] = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1.0)
    return [float(p) for p in corrected]

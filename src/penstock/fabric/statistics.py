"""Percentiles and what bounds them, a mean's interval, outliers: of delays, which are skewed and come in a row.

All of it takes plain numbers; a figure that the samples cannot bound is None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ArgumentError

Interval = tuple[float, float]
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
CONFIDENCE = 0.95
_FEWEST_FOR_MEAN = 6
_FEWEST_FOR_CORRELATION = 50


@dataclass(frozen=True, slots=True)
class Summary:
    """Of samples, in their own unit.

    Attributes:
        count: of the samples.
        p50, p90, p99, p999: by linear interpolation between order statistics, as numpy and pandas do; None where
            `order_interval` has no bound: below 6, 36, 368 and 3,688 samples.
        mean_interval: see `mean_interval`; None below 6 samples.
        intervals: of each percentile by name, None where the percentile is.
    """

    count: int
    min: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None
    max: float | None
    mean: float | None
    mean_interval: Interval | None
    intervals: dict[str, Interval | None] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: ArrayLike) -> Summary:
        """Of samples in the order in which they were taken; of none, every figure is None."""
        values = np.asarray(samples, float).ravel()
        count = len(values)
        if not count:
            nothing: dict[str, Interval | None] = dict.fromkeys(PERCENTILES)
            return cls(0, None, None, None, None, None, None, None, None, nothing)
        ordered = np.sort(values)
        intervals: dict[str, Interval | None] = {}
        points: dict[str, float | None] = {}
        for name, q in PERCENTILES.items():
            ranks = order_interval(count, q)
            intervals[name] = ranks and (float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1]))
            points[name] = None if ranks is None else float(np.quantile(ordered, q))
        return cls(
            count=count,
            min=float(ordered[0]),
            max=float(ordered[-1]),
            mean=float(values.mean()),
            mean_interval=mean_interval(values),
            intervals=intervals,
            p50=points["p50"],
            p90=points["p90"],
            p99=points["p99"],
            p999=points["p999"],
        )

    def to_dict(self) -> dict[str, float | None]:
        """min, p50, p90, p99, p999, max and mean."""
        return {name: getattr(self, name) for name in ("min", *PERCENTILES, "max", "mean")}


@lru_cache(maxsize=256)
def order_interval(count: int, q: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Which order statistics bound the q-quantile of any continuous distribution, counted from 1.

    Each side is wrong with (1 - confidence) / 2 at most, by the binomial distribution of how many samples lie below
    the quantile (David and Nagaraja, Order Statistics, 7.1). Samples that depend on each other bound it less well.

    Returns:
        The two ranks; None where even the smallest or the largest sample does not bound it: q^count above 2.5 %.
    """
    side = (1 - confidence) / 2
    if count < 1 or max(q, 1 - q) ** count > side:
        return None
    below = np.cumsum(_binomial(count, q))  # P(at most k samples lie below the quantile)
    low = int(np.searchsorted(below, side, side="right"))  # the largest with P(fewer than low) <= side
    high = int(np.searchsorted(below, 1 - side - 1e-12)) + 1
    return max(low, 1), min(high, count)


def fewest(q: float, confidence: float = CONFIDENCE) -> int:
    """How many samples `order_interval` needs for a q-quantile."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(max(q, 1 - q)))


def _binomial(count: int, q: float) -> NDArray[np.float64]:
    """P(k of `count`), k = 0..count."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    k = np.arange(count + 1)
    return np.asarray(np.exp(logs[-1] - logs - logs[::-1] + k * math.log(q) + (count - k) * math.log1p(-q)))


def mean_interval(samples: ArrayLike) -> Interval | None:
    """The 95 % confidence interval of the mean; None below 6 samples.

    Student's t with Hall's transformation, which takes out the skewness (P. Hall, On the removal of skewness by
    transformation, J. R. Stat. Soc. B 54, 1992). On log-normal delays it covers as a bootstrap-t does (of 30 samples:
    92 %, where plain Student-t has 88 %) at the price of three sums, and has no random numbers. Samples that depend on
    each other count for fewer: see `correlation_time`. No interval knows of a tail that the samples have not met.
    """
    values = np.asarray(samples, float).ravel()
    if len(values) < _FEWEST_FOR_MEAN:
        return None
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if deviation <= 1e-12 * abs(mean):  # equal, but for rounding
        return mean, mean
    count = max(len(values) / correlation_time(values), float(_FEWEST_FOR_MEAN))
    skewness = float(((values - mean) ** 3).mean() / values.std() ** 3)
    t = _student(count - 1)
    error = deviation / math.sqrt(count)
    return mean - error * _hall(t, skewness, count), mean - error * _hall(-t, skewness, count)


def _hall(t: float, skewness: float, count: float) -> float:
    """The t of skewed samples that Hall's transformation makes a symmetric `t`."""
    if abs(skewness) < 1e-9:
        return t
    root = math.sqrt(count)
    return 3 * root / skewness * (float(np.cbrt(1 + skewness * (t / root - skewness / (6 * count)))) - 1)


def _student(freedom: float) -> float:
    """The 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; to 0.1 % from 5 degrees of freedom on)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def correlation_time(samples: ArrayLike) -> float:
    """How many samples in a row tell as much of the mean as one independent one: 1 or more.

    The integrated autocorrelation, cut where the sum of two neighbours is no longer above 0 (C. Geyer, Practical
    Markov chain Monte Carlo, 1992). Below 50 samples it cannot be told, and is 1.
    """
    values = np.asarray(samples, float).ravel()
    count = len(values)
    values = values - values.mean() if count else values
    if count < _FEWEST_FOR_CORRELATION or not np.any(values):
        return 1.0
    spectrum = np.fft.rfft(values, 2 ** math.ceil(math.log2(2 * count)))
    products = np.fft.irfft(np.abs(spectrum) ** 2)[:count]
    pairs = (products[: count - count % 2] / products[0]).reshape(-1, 2).sum(1)
    ends = np.flatnonzero(pairs <= 0)
    time = 2 * float(pairs[: ends[0] if len(ends) else None].sum()) - 1
    return min(max(time, 1.0), count / 2)


def outliers(samples: ArrayLike, factor: float = 8.0) -> NDArray[np.intp]:
    """Where the samples are that lie above the median by more than `factor` times the median absolute deviation.

    The deviation is scaled to a normal distribution's standard deviation; where more than half are equal it is 0, and
    the mean absolute deviation stands in.
    """
    values = np.asarray(samples, float).ravel()
    if not len(values):
        return np.empty(0, np.intp)
    middle = np.median(values)
    deviations = np.abs(values - middle)
    spread = 1.4826 * np.median(deviations) or 1.2533 * deviations.mean()
    return np.flatnonzero(values > middle + factor * spread) if spread else np.empty(0, np.intp)


def log_histogram(samples: ArrayLike, ratio: float = 1.1) -> tuple[list[float], list[int]]:
    """Edges, each `ratio` times the one before, and the counts between them. Samples of 0 count in the lowest bin."""
    values = np.asarray(samples, float).ravel()
    positive = values[values > 0]
    if not len(positive):
        return [], []
    step = math.log(ratio)
    places = np.floor(np.log(positive) / step).astype(int)
    first, last = int(places.min()), int(places.max())
    counts = np.bincount(places - first)
    counts[0] += len(values) - len(positive)
    return [math.exp(step * place) for place in range(first, last + 2)], [int(count) for count in counts]


class StreamingQuantile:
    """Quantiles of any number of samples in bounded memory, to 0.5 %: a histogram with bins of 1 %.

    From 1 ns to three hours, if samples are seconds; what lies outside counts as the nearest.
    """

    _LOWEST, _HIGHEST, _STEP = 1e-9, 1e4, math.log(1.01)

    def __init__(self) -> None:
        self._first = math.floor(math.log(self._LOWEST) / self._STEP)
        self._counts = np.zeros(math.ceil(math.log(self._HIGHEST) / self._STEP) - self._first, np.int64)
        self.count = 0

    def add(self, samples: ArrayLike) -> None:
        """One sample, or several."""
        values = np.clip(np.atleast_1d(np.asarray(samples, float)), self._LOWEST, self._HIGHEST)
        places = np.floor(np.log(values) / self._STEP).astype(int) - self._first
        np.add.at(self._counts, np.clip(places, 0, len(self._counts) - 1), 1)
        self.count += len(values)

    def quantile(self, q: float) -> float | None:
        """The middle of the bin in which it is; None while there are too few samples to bound it."""
        if self.count < fewest(q):
            return None
        place = int(np.searchsorted(np.cumsum(self._counts), q * self.count))
        return math.exp((min(place, len(self._counts) - 1) + self._first + 0.5) * self._STEP)


@dataclass(frozen=True, slots=True)
class Saturation:
    """Whether processors, not the network, set the times.

    Attributes:
        saturated: they do; figures of the network do not hold.
        scheduler_tails: ranks were interrupted often enough to have made the slowest hundredth of the trials.
        utilization: of the busiest machine, 0..1; None if unknown.
        text: all of it for people; empty if nothing is known.
    """

    saturated: bool
    scheduler_tails: bool
    utilization: float | None
    text: str


_BUSY, _STOLEN, _TAIL = 0.85, 0.05, 0.01


def saturation(
    cpu: Sequence[dict[str, Any]],
    *,
    shared_machine: bool,
    machine_cores: int,
    trials: int,
    cores: Sequence[int] = (),
) -> Saturation:
    """What the processors did in a run.

    Args:
        cpu: of each rank: `cpu_seconds`, `wall_seconds`, and where known `involuntary_switches`, and of its whole
            machine `busy` and `steal` (0..1 of all cores' time).
        shared_machine: the ranks are processes of one machine of `machine_cores` cores.
        trials: that were run meanwhile.
        cores: of each rank's own machine, where they are not shared; `machine_cores` if empty.

    Raises:
        ArgumentError: cores are not 1 or more.
    """
    if machine_cores < 1 or any(one < 1 for one in cores):
        raise ArgumentError(f"machine_cores={machine_cores}, cores={list(cores)}: expected 1 or more")
    known = [one for one in cpu if one.get("wall_seconds")]
    if not known:
        return Saturation(False, False, None, "")
    stolen = max(one.get("steal") or 0.0 for one in known)
    own = list(cores) if len(cores) == len(known) else [machine_cores] * len(known)
    # Of a process itself; its machine also works for the kernel's network, and for others.
    shares = [one["cpu_seconds"] / (one["wall_seconds"] * n) for one, n in zip(known, own, strict=True)]
    if shared_machine:
        alone = sum(one["cpu_seconds"] for one in known) / (max(one["wall_seconds"] for one in known) * machine_cores)
        busy = max(alone, *(one.get("busy") or 0.0 for one in known))
        where, crowded = f"{len(known)} hosts share {machine_cores} cores", len(known) > machine_cores
    else:
        machines = [max(share, one.get("busy") or 0.0) for share, one in zip(shares, known, strict=True)]
        busy, crowded = max(machines), False
        where = f"rank {machines.index(busy)} is the busiest"
    switches = sum(one.get("involuntary_switches") or 0 for one in known)
    saturated = busy >= _BUSY or stolen >= _STOLEN
    tails = (saturated or crowded) and switches >= _TAIL * max(trials, 1)
    parts = [f"{where}, {busy:.0%} busy"]
    if stolen >= _STOLEN:
        parts.append(f"{stolen:.0%} taken by other virtual machines")
    if saturated:
        parts.append("the processors are the limit, not the network")
    if tails:
        parts.append(f"{switches:,} involuntary switches in {trials:,} trials: the tail may be the scheduler's")
    return Saturation(saturated, tails, busy, "; ".join(parts))

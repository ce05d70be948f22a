"""Percentiles and what bounds them, a mean's interval, outliers: of delays, which are skewed and come in a row.

All of it takes plain numbers; a figure that the samples cannot bound is None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import ArgumentError, require
from penstock.fabric.dependence import correlation_time, effective_counts

Interval = tuple[float, float]
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
CONFIDENCE = 0.95
_FEWEST_FOR_MEAN = 6
_FEWEST_FOR_BATCHES = 20
"""Independent samples that dependent ones have to be worth: with fewer no interval covers what it says.

Some series pass by chance, those whose dependence is taken for too little: of 200 normal samples with a lag-1
correlation of 0.9 15 %, of which the interval then covers 80 %. A higher limit only picks worse ones; a lower one lets
intervals explode where samples are skewed."""
_TIMES_A_BATCH, _MOST_BATCHES = 5, 20


@dataclass(frozen=True, slots=True)
class Summary:
    """Of samples, in their own unit.

    Attributes:
        count: of the samples, or of the rows of several.
        effective: for how many independent ones they count, at the percentile for which they count least.
        p50, p90, p99, p999: by linear interpolation between order statistics, as numpy and pandas do; None where
            `quantile_interval` has no bound: below 6, 36, 368 and 3,688 independent samples.
        mean_interval: see `mean_interval`; not below 0 where no sample is, as times are not.
        intervals: of each percentile by name, None where the percentile is.
    """

    count: int
    effective: float
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
        """Of samples in the order in which they were taken; of none, every figure is None.

        Args:
            samples: one after the other, or rows of as many each: those of a row may depend on each other in any way,
                so that a row counts as one sample at most.
        """
        values = np.atleast_1d(np.asarray(samples, float))
        rows = values.reshape(len(values), -1).mean(1) if values.size else np.empty(0)
        count = len(rows)
        if not count:
            nothing: dict[str, Interval | None] = dict.fromkeys(PERCENTILES)
            return cls(0, 0.0, None, None, None, None, None, None, None, None, nothing)
        ordered = np.sort(values, axis=None)
        effective = effective_counts(rows, tuple(PERCENTILES.values()))
        intervals: dict[str, Interval | None] = {}
        points: dict[str, float | None] = {}
        for (name, q), worth in zip(PERCENTILES.items(), effective, strict=True):
            intervals[name] = found = quantile_interval(ordered, q, worth)
            points[name] = None if found is None else float(np.quantile(ordered, q))
        return cls(
            count=count,
            effective=min(effective),
            min=float(ordered[0]),
            max=float(ordered[-1]),
            mean=float(rows.mean()),
            mean_interval=_of_times(mean_interval(rows)) if ordered[0] >= 0 else mean_interval(rows),
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

    Each side is wrong with (1 - confidence) / 2 at most, by the binomial distribution of how many independent samples
    lie below the quantile (David and Nagaraja, Order Statistics, 7.1).

    Returns:
        The two ranks; None where even the smallest or the largest sample does not bound it: q^count above 2.5 %.
    """
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import stats  # which takes a second to import

    side = (1 - confidence) / 2
    if count < 1 or max(q, 1 - q) ** count > side:
        return None
    low, high = stats.binom.ppf((side * (1 + 1e-9), 1 - side * (1 + 1e-9)), count, q)
    return max(int(low), 1), min(int(high) + 1, count)


def quantile_interval(ordered: NDArray[np.float64], q: float, effective: float) -> Interval | None:
    """The 95 % confidence interval of a quantile.

    Args:
        ordered: samples, the smallest first.
        effective: for how many independent ones they count.

    Returns:
        None where these do not bound it.
    """
    if effective >= len(ordered):
        ranks = order_interval(len(ordered), q)
        return ranks and (float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1]))
    if max(q, 1 - q) ** effective > (1 - CONFIDENCE) / 2:
        return None
    # Order statistics of a number that is not whole (A. Hutson, Calculating nonparametric confidence intervals for
    # quantiles using fractional order statistics, 1999), in their places among the samples.
    sides = ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    found = [_rank(q, effective, side) / (effective + 1) * (len(ordered) + 1) - 1 for side in sides]
    low, high = np.interp(found, np.arange(len(ordered)), ordered)
    return float(low), float(high)


def _of_times(interval: Interval | None) -> Interval | None:
    """Of samples that cannot be negative; then their mean cannot either, which no t distribution knows."""
    return interval and (max(interval[0], 0.0), interval[1])


def _rank(q: float, count: float, below: float) -> float:
    """Of the order statistic of `count` that is below the q-quantile so likely."""
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import optimize, special  # which takes a second to import

    def beyond(rank: float) -> float:
        return float(special.betainc(rank, count + 1 - rank, q)) - below

    least, most = 1e-9, count + 1 - 1e-9
    if beyond(least) <= 0:
        return least
    return most if beyond(most) >= 0 else float(optimize.brentq(beyond, least, most))


def fewest(q: float, confidence: float = CONFIDENCE) -> int:
    """How many independent samples `order_interval` needs for a q-quantile."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(max(q, 1 - q)))


def mean_interval(samples: ArrayLike) -> Interval | None:
    """The 95 % confidence interval of the mean; None for fewer than 6 samples, or so dependent ones that count as few.

    Samples that depend on each other are taken together first, in batches that hardly do, and as many batches are as
    good as independent ones. Then Student's t with Hall's transformation, which takes out the skewness (P. Hall, On
    the removal of skewness by transformation, J. R. Stat. Soc. B 54, 1992). On log-normal delays it covers as a
    bootstrap-t does (of 30 samples: 92 %, where plain Student-t has 88 %) at the price of three sums, and has no
    random numbers. No interval knows of a tail that the samples have not met.
    """
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import special  # which takes a second to import

    values = np.asarray(samples, float).ravel()
    if len(values) < _FEWEST_FOR_MEAN:
        return None
    time = correlation_time(values)
    if time > 1 and len(values) / time < _FEWEST_FOR_BATCHES:
        return None
    mean, batches, size = float(values.mean()), values, 1
    if time > 1:
        count = int(np.clip(len(values) / (_TIMES_A_BATCH * time), _FEWEST_FOR_MEAN, _MOST_BATCHES))
        size = len(values) // count
        batches = values[len(values) - count * size :].reshape(count, size).mean(1)
    count, deviation = len(batches), float(batches.std(ddof=1))
    if deviation <= 1e-12 * abs(mean):  # equal, but for rounding
        return mean, mean
    skewness = float(((batches - batches.mean()) ** 3).mean() / batches.std() ** 3)
    t = float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    error = deviation / math.sqrt(count)
    if time > 1:  # neighbouring batches still share a little, which their deviation does not show
        error /= math.sqrt(1 - time / size)
    return mean - error * _hall(t, skewness, count), mean - error * _hall(-t, skewness, count)


def _hall(t: float, skewness: float, count: float) -> float:
    """The t of skewed samples that Hall's transformation makes a symmetric `t`."""
    if abs(skewness) < 1e-9:
        return t
    root = math.sqrt(count)
    return 3 * root / skewness * (float(np.cbrt(1 + skewness * (t / root - skewness / (6 * count)))) - 1)


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
        saturated: they do, or may where nobody knows; figures of the network do not hold.
        scheduler_tails: ranks were interrupted often enough to have made the slowest hundredth of the trials.
        utilization: of the busiest machine, 0..1; None if unknown.
        text: all of it for people; empty if nothing is known.
    """

    saturated: bool
    scheduler_tails: bool
    utilization: float | None
    text: str


_BUSY, _STOLEN, _TAIL = 0.85, 0.05, 0.01
_NETWORK = 80.0
"""Percent of the times that the network alone takes, from which it is the limit, however busy processors are."""


def saturation(
    cpu: Sequence[dict[str, Any]],
    *,
    shared_machine: bool,
    machine_cores: int,
    trials: int,
    cores: Sequence[int] = (),
    network_percent: float | None = 0.0,
) -> Saturation:
    """What the processors did in a run.

    Args:
        cpu: of each rank: `cpu_seconds`, `wall_seconds`, and where known `involuntary_switches`, and of its whole
            machine `busy` and `steal` (0..1 of all cores' time).
        shared_machine: the ranks are processes of one machine of `machine_cores` cores.
        trials: that were run meanwhile.
        cores: of each rank's own machine, where they are not shared; `machine_cores` if empty.
        network_percent: of the time of each transfer, at least, what its algorithm takes on these links if processors
            cost nothing; near all of it, processors are no limit. None: nobody knows, so that neither is said.

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
    crammed = busy >= _BUSY or stolen >= _STOLEN
    saturated = crammed and (network_percent is None or network_percent < _NETWORK)
    tails = (crammed or crowded) and switches >= _TAIL * max(trials, 1)
    parts = [f"{where}, {busy:.0%} busy"]
    if stolen >= _STOLEN:
        parts.append(f"{stolen:.0%} taken by other virtual machines")
    if crammed and network_percent is None:
        parts.append("whether they or the network set the times is not known")
    elif saturated:
        parts.append("the processors are the limit, not the network")
    elif crammed:
        parts.append(
            f"yet {min(network_percent or 0.0, 100):.0f}% of the times or more is what the network alone takes"
        )
    if tails:
        parts.append(f"{switches:,} involuntary switches in {trials:,} trials: the tail may be the scheduler's")
    return Saturation(saturated, tails, busy, "; ".join(parts))

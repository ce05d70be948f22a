"""Statistics of delays, which are skewed and correlated: percentiles and means with intervals, outliers, warm-up.

Functions take plain numbers. A figure that the samples cannot bound is None, never a guess.

Consecutive trials depend on each other (a full queue stays full for a while), so a series is worth fewer independent
trials. How many rests on the autocorrelation of the normal scores (the values that the ranks would have in a normal
distribution), so that a few outliers do not mask a dependence. The sum over lags stops where the sum of two neighboring
lags is no longer positive (C. Geyer, Practical Markov chain Monte Carlo, 1992). Subtracting the series' own mean biases
the autocorrelation down by roughly the variance of that mean; this is added back (F. Marriott and J. Pope, Bias in the
estimation of autocorrelations, 1954).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock._base.errors import require

Series = NDArray[np.float64]

MIN_SAMPLES = 50
"""With fewer samples, correlation cannot be told from independence."""
_SIGNIFICANT = 1.645
"""Lag-1 correlation counts as real above this many standard errors."""
_WIDER = 4.0
"""Correlation times per degree of freedom: the fewer of them a series spans, the less certain their estimate."""


def scipy() -> tuple[Any, Any]:
    """Return scipy's stats and special modules. Raise MissingExtraError if it is not installed."""
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import special, stats  # takes a second to import

    return stats, special


def autocorrelation(samples: ArrayLike) -> Series:
    """Return the autocorrelation of the normal scores, from lag 0 to the last that counts (only 0 if independent)."""
    stats, special = scipy()

    values = np.asarray(samples, float).ravel()
    count = len(values)
    if count < MIN_SAMPLES or np.ptp(values) == 0:
        return np.ones(1)
    scores = special.ndtri((stats.rankdata(values) - 0.5) / count)
    scores -= scores.mean()
    spectrum = np.fft.rfft(scores, 2 ** math.ceil(math.log2(2 * count)))
    products = np.fft.irfft(np.abs(spectrum) ** 2)[:count]
    raw = products / products[0]
    if raw[1] <= _SIGNIFICANT / math.sqrt(count):
        return np.ones(1)
    lags = _cut(raw)
    for _ in range(2):
        time = _time(lags, count / 3)
        lags = _cut((raw + (1 - raw) * min(time / count, 0.5))[: max(int(6 * time), 4)])
    return lags


def correlation_time(samples: ArrayLike) -> float:
    """Return how many consecutive samples say as much about the mean as one independent sample: 1 or more.

    Fewer than 50 samples are too few to estimate it, and yield 1.
    """
    count = np.asarray(samples).size
    return _time(autocorrelation(samples), max(count / 2, 1.0))


def effective_counts(samples: ArrayLike, quantiles: tuple[float, ...]) -> tuple[float, ...]:
    """Return, for each quantile, how many independent samples these are worth when bounding it.

    Whether a sample lies below a quantile depends less on its neighbors than its value does; the bivariate normal
    distribution says how much less. Because the correlation is only an estimate, intervals are widened as by Student's
    t.
    """
    count, lags = np.asarray(samples).size, autocorrelation(samples)
    return tuple(_effective(_time(_below(lags, q), count / 2), count) for q in quantiles)


def _effective(time: float, count: int) -> float:
    _, special = scipy()

    if time <= 1:
        return float(count)
    freedom = max(count / (_WIDER * time), 1.5)
    wider = (float(special.stdtrit(freedom, 0.975)) / float(special.ndtri(0.975))) ** 2
    return count / time / wider * max(1 - time / count, 0.2)


def _cut(lags: Series) -> Series:
    pairs = lags[: len(lags) - len(lags) % 2].reshape(-1, 2).sum(1)
    ends = np.flatnonzero(pairs <= 0)
    return lags[: 2 * int(ends[0]) if len(ends) else None]


def _time(lags: Series, limit: float) -> float:
    return min(max(2 * float(lags.sum()) - 1, 1.0), limit)


def _below(lags: Series, q: float) -> Series:
    """Return the autocorrelation of "is below the q-quantile", from the autocorrelations `lags` of normal scores.

    Two normals of correlation r are both below it with the probability q - 2 T(z, sqrt((1 - r) / (1 + r))), by Owen's T
    (D. Owen, Tables for computing bivariate normal probabilities, 1956).
    """
    _, special = scipy()
    r = np.clip(lags, 0, 1)
    both_below = q - 2 * special.owens_t(special.ndtri(q), np.sqrt((1 - r) / (1 + r)))
    return np.asarray((both_below - q * q) / (q - q * q))


# -- figures -----------------------------------------------------------------------------------------------------------

Interval = tuple[float, float]
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
CONFIDENCE = 0.95
_MIN_FOR_MEAN = 6
_MIN_FOR_BATCHES = 20
"""The fewest independent samples that dependent ones must be worth for an interval to have its nominal coverage.

Some series pass by chance, because their dependence is underestimated. Of series of 200 normal samples with a lag-1
correlation of 0.9, 15% pass, and their intervals cover 80%. A higher limit only selects worse ones; with a lower limit,
intervals explode for skewed samples.
"""
_TIMES_PER_BATCH, _MAX_BATCHES = 5, 20


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary statistics of samples, in the samples' own unit.

    Attributes:
        count: the number of samples, or of rows of several samples.
        effective: how many independent samples they are worth, at the percentile where they are worth least.
        figures: min, p50, p90, p99, p999, max and mean. Percentiles are interpolated linearly between order statistics,
            as in numpy and pandas; None if `quantile_interval` has no bound, which means below 6, 36, 368 and 3,688
            independent samples.
        mean_interval: see `mean_interval`; clipped at 0 if no sample is negative, because times never are.
        intervals: each percentile's interval by name; None where the percentile is None.
    """

    count: int
    effective: float
    figures: dict[str, float | None]
    mean_interval: Interval | None
    intervals: dict[str, Interval | None]

    @property
    def p50(self) -> float | None:
        return self.figures["p50"]

    @classmethod
    def from_samples(cls, samples: ArrayLike) -> Summary:
        """Summarize samples given in the order in which they were taken; without samples, every figure is None.

        Args:
            samples: a sequence of samples, or of rows of equal length. Samples within a row may depend on each other in
                any way, so a row counts as one sample at most.
        """
        values = np.atleast_1d(np.asarray(samples, float))
        rows = values.reshape(len(values), -1).mean(1) if values.size else np.empty(0)
        count = len(rows)
        if not count:
            no_figures: dict[str, None] = dict.fromkeys(("min", *PERCENTILES, "max", "mean"))
            return cls(0, 0.0, {**no_figures}, None, dict.fromkeys(PERCENTILES))
        ordered = np.sort(values, axis=None)
        effective, mean = effective_counts(rows, tuple(PERCENTILES.values())), mean_interval(rows)
        pairs = zip(PERCENTILES.items(), effective, strict=True)
        intervals = {name: quantile_interval(ordered, q, n) for (name, q), n in pairs}
        percentiles = {name: intervals[name] and float(np.quantile(ordered, q)) for name, q in PERCENTILES.items()}
        return cls(
            count,
            min(effective),
            {"min": float(ordered[0]), **percentiles, "max": float(ordered[-1]), "mean": float(rows.mean())},
            mean and (max(mean[0], 0.0) if ordered[0] >= 0 else mean[0], mean[1]),
            intervals,
        )


def quantile_interval(ordered: NDArray[np.float64], q: float, effective: float) -> Interval | None:
    """Return the 95% confidence interval of a quantile of ascending samples that are worth `effective` independent
    ones; None if not even the smallest or the largest sample would bound it, which is when q^effective is above 2.5%.

    The number of independent samples below the quantile is binomial, whatever their distribution (David and Nagaraja,
    Order Statistics, 7.1). Of dependent samples, ranks are fractional and mapped to positions among the samples (A.
    Hutson, Calculating nonparametric confidence intervals for quantiles using fractional order statistics, 1999).
    """
    _, special = scipy()
    side = (1 - CONFIDENCE) / 2
    if max(q, 1 - q) ** effective > side:
        return None
    ranks = [float(special.bdtrik(below, effective, q)) + 1 for below in (side, 1 - side)]
    positions = [rank / (effective + 1) * (len(ordered) + 1) - 1 for rank in ranks]
    if effective >= len(ordered):  # between two samples it would not hold for delays that have several modes
        positions = [math.floor(positions[0]), math.ceil(positions[1])]
    low, high = np.interp(positions, np.arange(len(ordered)), ordered)
    return float(low), float(high)


def min_samples(q: float) -> int:
    """Return the fewest independent samples for which `quantile_interval` bounds a q-quantile."""
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(max(q, 1 - q)))


def mean_interval(samples: ArrayLike) -> Interval | None:
    """Return the 95% confidence interval of the mean; None if there are fewer than 6 samples, or too dependent ones.

    Dependent samples are first averaged in batches that hardly depend on each other. The batches are then treated as
    independent, using Student's t with Hall's transformation, which removes skewness (P. Hall, On the removal of
    skewness by transformation, J. R. Stat. Soc. B 54, 1992). On log-normal delays its coverage equals a bootstrap-t's
    (92% for 30 samples, against 88% for plain Student's t), for the price of three sums and without random numbers. No
    interval accounts for a tail that the samples have not hit.
    """
    _, special = scipy()
    values = np.asarray(samples, float).ravel()
    if len(values) < _MIN_FOR_MEAN:
        return None
    time = correlation_time(values)
    if time > 1 and len(values) / time < _MIN_FOR_BATCHES:
        return None
    mean, batches, size = float(values.mean()), values, 1
    if time > 1:
        count = int(np.clip(len(values) / (_TIMES_PER_BATCH * time), _MIN_FOR_MEAN, _MAX_BATCHES))
        size = len(values) // count
        batches = values[len(values) - count * size :].reshape(count, size).mean(1)
    count, deviation = len(batches), float(batches.std(ddof=1))
    if deviation <= 1e-12 * abs(mean):  # equal up to rounding
        return mean, mean
    skewness = float(((batches - batches.mean()) ** 3).mean() / batches.std() ** 3)
    t = float(special.stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    error = deviation / math.sqrt(count)
    if time > 1:  # neighboring batches are still slightly correlated, which their deviation does not show
        error /= math.sqrt(1 - time / size)
    return mean - error * _hall(t, skewness, count), mean - error * _hall(-t, skewness, count)


def _hall(t: float, skewness: float, count: float) -> float:
    """Return the t of skewed samples that Hall's transformation maps to a symmetric `t`."""
    if abs(skewness) < 1e-9:
        return t
    root = math.sqrt(count)
    return 3 * root / skewness * (float(np.cbrt(1 + skewness * (t / root - skewness / (6 * count)))) - 1)


def outliers(samples: ArrayLike, factor: float = 8.0) -> NDArray[np.intp]:
    """Return the indices of samples above the median by more than `factor` times the median absolute deviation.

    The deviation is scaled to match a normal distribution's standard deviation. If it is 0 because more than half of
    the samples are equal, the mean absolute deviation is used instead.
    """
    values = np.asarray(samples, float).ravel()
    if not len(values):
        return np.empty(0, np.intp)
    middle = np.median(values)
    deviations = np.abs(values - middle)
    spread = 1.4826 * np.median(deviations) or 1.2533 * deviations.mean()
    return np.flatnonzero(values > middle + factor * spread) if spread else np.empty(0, np.intp)


# -- warm-up -----------------------------------------------------------------------------------------------------------

_SHORT, _LONG = 6, 30
"""The fewest trials that the test looks at, in a run of few trials and of many."""
_MAX_TRIALS = 200
"""The most trials in a warm-up."""
_EVERY = 5
"""The number of trials between two tests."""
_SIGN, _CERTAIN = 1.0, 2.6
"""The test statistic, in standard deviations, that is a sign of a trend, and that makes a trend certain."""
_MATTERS = 0.01
"""A relative change below this does not matter."""
_HIGHEST = 0.9


class WarmUp:
    """The trials that run before those that count, until the last ones show no trend: TCP windows, caches and clocks
    have settled.

    Noise may hide a trend, and the test is repeated many times, so it continues at the slightest sign of a trend.

    Args:
        trials: the number of trials that will count. A short run has a short warm-up: usually half as many trials, and
            at most as many (or 6, if that is more).
    """

    def __init__(self, trials: int) -> None:
        self._window = min(max(trials // 2, _SHORT), _LONG)
        self._max_trials = min(max(trials, self._window), _MAX_TRIALS)
        self._values: list[float] = []

    def add(self, times: Sequence[float]) -> None:
        """Add one trial: how long each of its transfers took, in any unit. All transfers have equal weight."""
        self._values.append(math.fsum(math.log(max(value, 1e-12)) for value in times) / len(times))

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def is_over(self) -> bool:
        """True if nothing suggests that times are still changing, or the warm-up has reached its maximum length."""
        if self.count < self._window:
            return False
        return self.count >= self._max_trials or ((self.count - self._window) % _EVERY == 0 and self._changes() < _SIGN)

    @property
    def is_steady(self) -> bool:
        """False if it is certain that times are still changing."""
        return self._changes() < _CERTAIN

    def _changes(self) -> float:
        """Return the strength of the trend in standard deviations; 0 if the change is too small to matter."""
        last = np.array(self._values[-max(self._window, self.count // 2) :])
        third = len(last) // 3
        if abs(np.median(last[-third:]) - np.median(last[:third])) < _MATTERS:
            return 0.0
        return abs(trend(last))


def trend(samples: ArrayLike) -> float:
    """Return the trend of six or more samples in standard deviations: positive if rising, negative if falling.

    This is Mann and Kendall's trend test (H. Mann, Nonparametric tests against trend, 1945), which is robust to a few
    outliers. If the residuals around a straight line are correlated, the trend counts for less, as in K. Hamed and A.
    Rao, A modified Mann-Kendall trend test for autocorrelated data, 1998.
    """
    stats, _ = scipy()
    values = np.asarray(samples, float)
    count, order = len(values), np.arange(len(values))
    if np.ptp(values) == 0:
        return 0.0
    agreeing = float(stats.kendalltau(order, values).statistic)
    score = agreeing * 3 * math.sqrt(count * (count - 1) / (2 * (2 * count + 5)))
    ranks = stats.rankdata(values)
    residuals = ranks - np.polyval(np.polyfit(order, ranks, 1), order)
    spread = float((residuals**2).sum())
    correlation = float((residuals[1:] * residuals[:-1]).sum()) / spread if spread > 1e-9 else 0.0
    # It counts as 0 if it could be chance.
    correlation = min(correlation, _HIGHEST) if correlation > _SIGNIFICANT / math.sqrt(count) else 0.0
    return score / math.sqrt((1 + correlation) / (1 - correlation))

"""Test whether two series of times differ: in the median, in shape, or in the tail. Uses scipy where it can.

A test returns its p-value: how likely series that do not differ are as far apart (two-sided).

Consecutive trials depend on each other (a full queue stays full for a while), and tests that assume independence find
differences between a run and itself. Each test here therefore takes the number of independent samples into account
(`correlation_time`), by inflating the variance or by counting fewer samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from penstock.network.fabric.statistics import CONFIDENCE, Interval, scipy

Samples = NDArray[np.float64]


def mann_whitney(a: Samples, b: Samples, inflation: float = 1.0) -> float:
    """Tests by Mann and Whitney's U: the number of pairs in which the sample of `a` is larger, ties counting half.

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
    """Returns the variance of U if nothing differs."""
    (stats, _), m, n = scipy(), len(a), len(b)
    return m * n / 12 * (m + n + 1) * float(stats.tiecorrect(stats.rankdata(np.concatenate([a, b]))))


def kolmogorov_smirnov(a: Samples, b: Samples, effective: tuple[float, float] | None = None) -> float:
    """Tests by the largest distance between the distribution functions, with Kolmogorov's limiting distribution.

    Stephens' correction is applied (M. Stephens, Use of the Kolmogorov-Smirnov, Cramer-von Mises and related statistics
    without extensive tables, 1970). The test detects differences in shape, but hardly any that affect only one trial in
    a hundred; `tails` detects those. `effective`: how many independent samples each series is worth; None: all.
    """
    stats, special = scipy()
    m, n = effective or (len(a), len(b))
    distance = float(stats.ks_2samp(a, b, method="asymp").statistic)
    root = math.sqrt(m * n / (m + n))
    return float(special.kolmogorov((root + 0.12 + 0.11 / root) * distance))


def tails(a: Samples, b: Samples, q: float) -> float:
    """Tests whether one series has more than its share of the slowest samples of both, with Fisher's exact test.

    Consecutive slow samples are one event and count once.
    """
    threshold = float(np.quantile(np.concatenate([a, b]), q))
    slow = [_events(one > threshold) for one in (a, b)]
    return float(scipy()[0].fisher_exact([slow, [len(a) - slow[0], len(b) - slow[1]]]).pvalue)


def _events(slow: NDArray[np.bool_]) -> int:
    """Counts the runs of True."""
    return int(slow[:1].sum() + (slow[1:] & ~slow[:-1]).sum())


def shift(a: Samples, b: Samples, inflation: float = 1.0) -> tuple[float, Interval]:
    """Returns how much larger b's samples are than a's, with the 95% confidence interval.

    The shift is the median of all pairwise differences (Hodges and Lehmann, 1963). The interval contains the shifts
    that `mann_whitney` does not reject.
    """
    a, b = np.sort(a), np.sort(b)
    pairs = len(a) * len(b)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(_variance(a, b) * inflation)
    low = max(math.floor(pairs / 2 - half), 0)  # counted from 0
    middle = (_difference(a, b, (pairs - 1) // 2) + _difference(a, b, pairs // 2)) / 2
    return middle, (_difference(a, b, low), _difference(a, b, pairs - 1 - low))


def _difference(a: Samples, b: Samples, place: int) -> float:
    """Returns the difference b - a at index `place` of all differences sorted, by bisecting on its value."""
    low, high = float(b[0] - a[-1]), float(b[-1] - a[0])
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if int(np.searchsorted(b, a + middle, "right").sum()) > place:
            high = middle
        else:
            low = middle
    return low if int(np.searchsorted(b, a + low, "right").sum()) > place else high


def holm(ps: Sequence[float]) -> list[float]:
    """Returns p-values corrected for multiple tests with Holm's method.

    If nothing differs, the chance that any corrected p-value falls below a level is at most that level (S. Holm, A
    simple sequentially rejective multiple test procedure, 1979).
    """
    values, order = np.asarray(ps, float), np.argsort(ps)
    corrected = np.empty(len(values))
    corrected[order] = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)).clip(max=1.0)
    return [float(p) for p in corrected]

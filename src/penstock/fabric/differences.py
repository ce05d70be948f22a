"""Do two series of times differ: in the middle, in the shape, in the tail? By scipy, where it takes them.

Trials in a row depend on each other (a queue that is full stays full for a while), and tests that take them as
independent find differences between a run and itself. So each test takes for how many independent samples a sample
counts (`correlation_time`): `inflation` of the variance, or fewer samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import require
from penstock.fabric.statistics import CONFIDENCE, Interval

Samples = NDArray[np.float64]


class Tested(NamedTuple):
    """A statistic, and how likely one as extreme is if nothing differs (two-sided)."""

    statistic: float
    p: float


def mann_whitney(a: Samples, b: Samples, inflation: float = 1.0) -> Tested:
    """U of `a`: of all pairs, in how many its sample is the larger (ties: half), with the normal approximation.

    The variance is corrected for ties, the statistic for continuity (H. Mann and D. Whitney, 1947; Lehmann,
    Nonparametrics, 1.5), as in scipy's test, which cannot inflate it. Good from 8 samples each on.
    """
    stats, special = _scipy()
    u = float(stats.rankdata(np.concatenate([a, b]))[: len(a)].sum()) - len(a) * (len(a) + 1) / 2
    variance = _variance(a, b) * inflation
    if variance <= 0:
        return Tested(u, 1.0)
    z = max(abs(u - len(a) * len(b) / 2) - 0.5, 0) / math.sqrt(variance)
    return Tested(u, 2 * float(special.ndtr(-z)))


def _variance(a: Samples, b: Samples) -> float:
    """Of U, if nothing differs."""
    m, n = len(a), len(b)
    return m * n / 12 * (m + n + 1) * float(_scipy()[0].tiecorrect(_scipy()[0].rankdata(np.concatenate([a, b]))))


def kolmogorov_smirnov(a: Samples, b: Samples, effective: tuple[float, float] | None = None) -> Tested:
    """The largest distance of the two distribution functions, with Kolmogorov's limit and Stephens' correction
    (M. Stephens, Use of the Kolmogorov-Smirnov, Cramer-von Mises and related statistics without extensive tables,
    1970). It sees shapes, and little of what happens in one trial of a hundred: that is `tails`.

    Args:
        a, b: the samples.
        effective: of how many independent samples each is worth; all, if nothing is said.
    """
    stats, special = _scipy()
    m, n = effective or (len(a), len(b))
    distance = float(stats.ks_2samp(a, b, method="asymp").statistic)
    root = math.sqrt(m * n / (m + n))
    return Tested(distance, float(special.kolmogorov((root + 0.12 + 0.11 / root) * distance)))


def tails(a: Samples, b: Samples, q: float) -> Tested:
    """Whether one has more of the slowest samples of both than its share, by Fisher's exact test.

    Slow samples in a row are one event, and count once. The statistic is the share of them that are of `b`.
    """
    threshold = float(np.quantile(np.concatenate([a, b]), q))
    slow = [_events(one > threshold) for one in (a, b)]
    if not sum(slow):
        return Tested(0.5, 1.0)
    table = [slow, [len(a) - slow[0], len(b) - slow[1]]]
    return Tested(slow[1] / sum(slow), float(_scipy()[0].fisher_exact(table).pvalue))


def _events(slow: NDArray[np.bool_]) -> int:
    """Runs of True."""
    return int(slow[:1].sum() + (slow[1:] & ~slow[:-1]).sum())


def _scipy() -> tuple[Any, Any]:
    """Its tests and its functions."""
    require("fabric", "scipy", for_what="the comparison of runs")
    from scipy import special, stats  # which takes a second to import

    return stats, special


def shift(a: Samples, b: Samples, inflation: float = 1.0) -> tuple[float, Interval]:
    """How much larger b's samples are than a's: the median of all differences (Hodges and Lehmann, 1963), and its 95 %
    interval, which holds those shifts that `mann_whitney` does not refuse."""
    a, b = np.sort(a), np.sort(b)
    pairs = len(a) * len(b)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(_variance(a, b) * inflation)
    low = max(math.floor(pairs / 2 - half), 0)  # counted from 0
    middle = (_difference(a, b, (pairs - 1) // 2) + _difference(a, b, pairs // 2)) / 2
    return middle, (_difference(a, b, low), _difference(a, b, pairs - 1 - low))


def _difference(a: Samples, b: Samples, place: int) -> float:
    """The difference b - a in this place of all in order, without making them all: by bisection of its value."""
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
    """Each p, corrected for how many there are: below a level, the chance of one false find among all is below it
    (S. Holm, A simple sequentially rejective multiple test procedure, 1979)."""
    corrected, highest = [0.0] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda one: ps[one])):
        highest = max(highest, min((len(ps) - place) * ps[index], 1.0))
        corrected[index] = highest
    return corrected

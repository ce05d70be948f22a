"""Estimate how many independent trials a series of dependent trials is worth. (A full queue stays full for a while.)

Everything rests on the autocorrelation of the normal scores (the values that the ranks would have in a normal
distribution), so that a few outliers do not mask a dependence. The sum over lags stops where the sum of two
neighboring lags is no longer positive (C. Geyer, Practical Markov chain Monte Carlo, 1992). Subtracting the series'
own mean biases the autocorrelation down by roughly the variance of that mean; this is added back (F. Marriott and J.
Pope, Bias in the estimation of autocorrelations, 1954).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock._base.errors import require

Series = NDArray[np.float64]

FEWEST = 50
"""With fewer samples, correlation cannot be told from independence."""
_SIGNIFICANT = 1.645
"""Lag-1 correlation counts as real above this many standard errors."""
_WIDER = 4.0
"""Correlation times per degree of freedom: the fewer of them a series spans, the less certain their estimate."""


def scipy() -> tuple[Any, Any]:
    """Returns scipy's stats and special modules. Raises MissingExtraError if it is not installed."""
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import special, stats  # takes a second to import

    return stats, special


def autocorrelation(samples: ArrayLike) -> Series:
    """Returns the autocorrelation of the normal scores, from lag 0 to the last that counts (only 0 if independent)."""
    stats, special = scipy()

    values = np.asarray(samples, float).ravel()
    count = len(values)
    if count < FEWEST or np.ptp(values) == 0:
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
    """Returns how many consecutive samples say as much about the mean as one independent sample: 1 or more.

    Fewer than 50 samples are too few to estimate it, and yield 1.
    """
    count = np.asarray(samples).size
    return _time(autocorrelation(samples), max(count / 2, 1.0))


def effective_counts(samples: ArrayLike, quantiles: tuple[float, ...]) -> tuple[float, ...]:
    """Returns, for each quantile, how many independent samples these are worth when bounding it.

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


def _time(lags: Series, most: float) -> float:
    return min(max(2 * float(lags.sum()) - 1, 1.0), most)


def _below(lags: Series, q: float) -> Series:
    """Returns the autocorrelation of "is below the q-quantile", from the autocorrelations `lags` of normal scores.

    Two normals of correlation r are both below it with the probability q - 2 T(z, sqrt((1 - r) / (1 + r))), by Owen's T
    (D. Owen, Tables for computing bivariate normal probabilities, 1956).
    """
    _, special = scipy()
    r = np.clip(lags, 0, 1)
    both = q - 2 * special.owens_t(special.ndtri(q), np.sqrt((1 - r) / (1 + r)))
    return np.asarray((both - q * q) / (q - q * q))

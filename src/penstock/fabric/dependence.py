"""For how many independent trials a series of trials counts. A queue that is full stays full for a while.

All rests on the autocorrelation of the normal scores (what the ranks would be in a normal distribution), so that a few
outliers hide nothing. It is summed up to where two neighbours' sum is no longer above 0 (C. Geyer, Practical Markov
chain Monte Carlo, 1992). As the mean of the series itself is taken off, it comes out too small, by about the variance
of that mean, which is put back (F. Marriott and J. Pope, Bias in the estimation of autocorrelations, 1954).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import require

Series = NDArray[np.float64]

FEWEST = 50
"""Samples, below which a correlation cannot be told from none."""
_SIGNIFICANT = 1.645
"""Standard errors of the correlation of neighbours, above which it is taken for one."""
_WIDER = 4.0
"""So many correlation times make one degree of freedom: the fewer there are, the less their own length is known."""


def autocorrelation(samples: ArrayLike) -> Series:
    """Of the normal scores, by lag from 0 on, as far as it counts; of 0 alone where the samples are independent."""
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import special, stats  # which takes a second to import

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
    """How many samples in a row tell as much of the mean as one independent one: 1 or more.

    Below 50 samples it cannot be told, and is 1.
    """
    count = np.asarray(samples).size
    return _time(autocorrelation(samples), max(count / 2, 1.0))


def effective_counts(samples: ArrayLike, quantiles: tuple[float, ...]) -> tuple[float, ...]:
    """For how many independent ones the samples count in an interval of each quantile.

    What lies below a quantile depends less on its neighbours than the samples themselves, by the bivariate normal
    distribution. That the correlation is an estimate makes an interval wider, as Student's t does.
    """
    count, lags = np.asarray(samples).size, autocorrelation(samples)
    return tuple(_effective(_time(_below(lags, q), count / 2), count) for q in quantiles)


def _effective(time: float, count: int) -> float:
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import special  # which takes a second to import

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
    """The autocorrelation of being below the q-quantile, for normal scores of this one."""
    angles, covered = _quadrant(q)
    return np.asarray(np.interp(np.arcsin(np.clip(lags, 0, 1)), angles, covered) / covered[-1])


@lru_cache(maxsize=8)
def _quadrant(q: float) -> tuple[Series, Series]:
    """By the arc sine of a correlation: how much likelier two normal variables are both below their q-quantiles than
    independent ones (Sheppard's formula, integrated)."""
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import special  # which takes a second to import

    angles = np.linspace(0, math.pi / 2, 400)
    density = np.exp(-(special.ndtri(q) ** 2) / (1 + np.sin(angles))) / (2 * math.pi)
    steps = (density[1:] + density[:-1]) / 2 * np.diff(angles)
    return angles, np.concatenate([[0.0], np.cumsum(steps)])

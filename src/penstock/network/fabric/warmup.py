"""Decide when a warm-up is over: when its last trials show no trend, so TCP windows, caches and clocks have settled.

The test is Mann and Kendall's trend test (H. Mann, Nonparametric tests against trend, 1945), which is robust to a few
outliers, on the last half of the warm-up trials so far. If the residuals around a straight line are correlated, the
trend counts for less, as in K. Hamed and A. Rao, A modified Mann-Kendall trend test for autocorrelated data, 1998.
Noise may hide a trend, and the test is repeated many times, so the warm-up continues at the slightest sign of a trend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from penstock.network.fabric.statistics import scipy

_FEWEST, _LONG = 6, 30
"""The fewest trials that the test looks at, in a run of few trials and of many."""
_MAX_TRIALS = 200
"""The most trials in a warm-up."""
_EVERY = 5
"""The number of trials between two tests."""
_SIGN, _CERTAIN = 1.0, 2.6
"""The test statistic, in standard deviations, that is a sign of a trend, and that makes a trend certain."""
_MATTERS = 0.01
"""A relative change below this does not matter."""
_SIGNIFICANT = 1.645
"""Lag-1 correlation counts as real above this many standard errors."""
_HIGHEST = 0.9


class WarmUp:
    """The trials that run before those that count.

    Args:
        trials: the number of trials that will count. A short run has a short warm-up: usually half as many trials, and
            at most as many (or 6, if that is more).
    """

    def __init__(self, trials: int) -> None:
        self._window = min(max(trials // 2, _FEWEST), _LONG)
        self._most = min(max(trials, self._window), _MAX_TRIALS)
        self._values: list[float] = []

    def add(self, took: Sequence[float]) -> None:
        """Adds one trial: how long each of its transfers took, in any unit. All transfers have equal weight."""
        self._values.append(math.fsum(math.log(max(one, 1e-12)) for one in took) / len(took))

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def is_over(self) -> bool:
        """True if nothing suggests that times are still changing, or the warm-up has reached its maximum length."""
        if self.count < self._window:
            return False
        return self.count >= self._most or ((self.count - self._window) % _EVERY == 0 and self._changes() < _SIGN)

    @property
    def is_steady(self) -> bool:
        """False if it is certain that times are still changing."""
        return self._changes() < _CERTAIN

    def _changes(self) -> float:
        """Returns the strength of the trend in standard deviations; 0 if the change is too small to matter."""
        last = np.array(self._values[-max(self._window, self.count // 2) :])
        third = len(last) // 3
        if abs(np.median(last[-third:]) - np.median(last[:third])) < _MATTERS:
            return 0.0
        return abs(trend(last))


def trend(samples: ArrayLike) -> float:
    """Returns the trend of six or more samples in standard deviations: positive if rising, negative if falling."""
    stats, _ = scipy()
    values = np.asarray(samples, float)
    count, order = len(values), np.arange(len(values))
    if np.ptp(values) == 0:
        return 0.0
    agreeing = float(stats.kendalltau(order, values).statistic)
    found = agreeing * 3 * math.sqrt(count * (count - 1) / (2 * (2 * count + 5)))
    ranks = stats.rankdata(values)
    left = ranks - np.polyval(np.polyfit(order, ranks, 1), order)
    spread = float((left**2).sum())
    correlation = float((left[1:] * left[:-1]).sum()) / spread if spread > 1e-9 else 0.0
    # It counts as 0 if it could be chance.
    correlation = min(correlation, _HIGHEST) if correlation > _SIGNIFICANT / math.sqrt(count) else 0.0
    return found / math.sqrt((1 + correlation) / (1 - correlation))

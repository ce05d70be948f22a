"""When a warm-up is over: its last trials show no trend any more. TCP's windows, caches and clocks settle meanwhile.

The test is Mann and Kendall's of a trend (H. Mann, Nonparametric tests against trend, 1945), which a few outliers do
not move, over the last half of what was tried. Where what is left of a straight trend depends on its neighbours, it
counts for less, as in K. Hamed and A. Rao, A modified Mann-Kendall trend test for autocorrelated data, 1998. A trend
may hide behind noise, and is looked for again and again; so the warm-up goes on at the least sign of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import require

_FEWEST, _LONG = 6, 30
"""Trials that the test looks at, at least: in a run of few trials, and of many."""
_MOST = 200
"""Trials of a warm-up."""
_EVERY = 5
"""So many trials come between one test and the next."""
_SIGN, _CERTAIN = 1.0, 2.6
"""Standard deviations of the test, from which there is a sign of a trend, and from which it is certain."""
_MATTERS = 0.01
"""A change, relative, below which a trend does not matter."""
_SIGNIFICANT = 1.645
"""Standard errors of the correlation of neighbours, above which it is taken for one."""
_HIGHEST = 0.9


class WarmUp:
    """Trials in front of those that count.

    Args:
        trials: that will count. A run of few has a short warm-up: half as many as a rule, and no more than as many.
    """

    def __init__(self, trials: int) -> None:
        self._window = min(max(trials // 2, _FEWEST), _LONG)
        self._most = min(max(trials, self._window), _MOST)
        self._values: list[float] = []

    def add(self, took: Sequence[float]) -> None:
        """A trial: how long each of its transfers took, in any unit. Each counts the same, however long it is."""
        self._values.append(math.fsum(math.log(max(one, 1e-12)) for one in took) / len(took))

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def is_over(self) -> bool:
        """Nothing says that times still change; or there were trials enough."""
        if self.count < self._window:
            return False
        return self.count >= self._most or ((self.count - self._window) % _EVERY == 0 and self._changes() < _SIGN)

    @property
    def is_steady(self) -> bool:
        """False where it is certain that times still change."""
        return self._changes() < _CERTAIN

    def _changes(self) -> float:
        """How sure a trend is, in standard deviations; 0 of one that does not matter."""
        last = np.array(self._values[-max(self._window, self.count // 2) :])
        third = len(last) // 3
        if abs(np.median(last[-third:]) - np.median(last[:third])) < _MATTERS:
            return 0.0
        return abs(trend(last))


def trend(samples: ArrayLike) -> float:
    """Of six samples or more, in order: above 0 where they grow, below where they fall, in standard deviations."""
    require("fabric", "scipy", for_what="the statistics of a run")
    from scipy import stats  # which takes a second to import

    values = np.asarray(samples, float)
    count, order = len(values), np.arange(len(values))
    if np.ptp(values) == 0:
        return 0.0
    agreeing = float(stats.kendalltau(order, values).statistic)
    found = agreeing * 3 * math.sqrt(count * (count - 1) / (2 * (2 * count + 5)))
    ranks = stats.rankdata(values)
    correlation = _neighbours(ranks - np.polyval(np.polyfit(order, ranks, 1), order))
    return found / math.sqrt((1 + correlation) / (1 - correlation))


def _neighbours(values: NDArray[np.float64]) -> float:
    """Their correlation, where it is more than chance."""
    spread = float((values**2).sum())
    found = float((values[1:] * values[:-1]).sum()) / spread if spread > 1e-9 else 0.0
    return min(found, _HIGHEST) if found > _SIGNIFICANT / math.sqrt(len(values)) else 0.0

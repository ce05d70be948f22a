"""Figures of two variants that take turns: the same steps with something and without it, on every clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

Pair = dict[str, tuple[float, float]]
"""By clock: the seconds without it, and those with it."""


def combined(of_round: Sequence[Pair]) -> Pair:
    """One pair of all processes: what they took together of processors, and the slowest one on the wall."""
    return {
        name: tuple((max if name == "wall" else sum)(pair[name][which] for pair in of_round) for which in (0, 1))
        for name in of_round[0]
    }  # type: ignore[misc]


def added(percents: Iterable[float]) -> dict[str, object]:
    """What it adds, in percent: the median with its 95% interval, and quartiles."""
    found = sorted(percents)
    away = math.ceil(0.98 * math.sqrt(len(found)))  # order statistics, 1.96 standard deviations from the middle
    middle = len(found) // 2
    interval = found[max(0, middle - away)], found[min(len(found) - 1, middle + away)]
    return {
        "added_percent": round(statistics.median(found), 2),
        "interval_95": [round(each, 2) for each in interval],
        "quartiles": [round(each, 2) for each in statistics.quantiles(found, n=4)],
    }

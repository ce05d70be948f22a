"""What each rank took, and which one the others waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.fabric.samples import Run

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Of one rank over all trials.

    Attributes:
        median_seconds: of what its transfers of a trial took together.
        longest: the share of the transfers that it takes part in for which it took the longest of all.
        last: the share in which it was the last to begin: the others waited for it.
    """

    rank: int
    median_seconds: float
    longest: float
    last: float


def durations(run: Run) -> Floats:
    """In seconds, by trial, transfer and rank; NaN where a rank takes no part."""
    return np.where(run.end_ns >= 0, (run.end_ns - run.start_ns) / 1e9, np.nan)


def figures_of_ranks(run: Run) -> list[RankFigures]:
    """Of each rank; of a run without trials, none."""
    took = durations(run)
    if not len(took):
        return []
    part = run.end_ns >= 0
    longest = np.where(part, took, -1.0).argmax(axis=2)
    last = np.where(part, run.start_ns, -1).argmax(axis=2)
    return [
        RankFigures(
            rank=rank,
            median_seconds=float(np.median(np.nansum(took[:, :, rank], axis=1))),
            longest=_share(longest == rank, part[:, :, rank]),
            last=_share(last == rank, part[:, :, rank]),
        )
        for rank in range(took.shape[2])
    ]


def slowest_rank(run: Run) -> int:
    """The one that took the longest in most transfers."""
    return max(figures_of_ranks(run), key=lambda figures: figures.longest).rank


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    return float(hits[among].mean()) if among.any() else 0.0

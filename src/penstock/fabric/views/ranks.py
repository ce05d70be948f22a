"""Which ranks took the longest, and which ones the others waited for, over all transfers of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Of one rank, over all trials of the transfers that it takes part in.

    Attributes:
        longest: the share for which it took the longest of all.
        last: the share in which it was the last to begin: the others waited for it.
    """

    rank: int
    longest: float
    last: float


def figures_of_ranks(results: dict[str, Any]) -> list[RankFigures]:
    """Of each rank that takes part in any transfer; of a run without trials, none."""
    counts: dict[int, tuple[int, int, int]] = {}
    for transfer in results["transfers"]:
        for found in transfer["per_rank"]:
            trials, longest, last = counts.get(found["rank"], (0, 0, 0))
            more = transfer["trials"], found["trials_slowest"], found["trials_latest"]
            counts[found["rank"]] = (trials + more[0], longest + more[1], last + more[2])
    return [RankFigures(rank, longest / n, last / n) for rank, (n, longest, last) in sorted(counts.items())]


def longest_group(results: dict[str, Any]) -> dict[str, Any]:
    """The alike transfers of which one takes the most time, by its mean."""
    groups: list[dict[str, Any]] = results["groups"]
    return max(groups, key=lambda group: float(group["time_s"]["mean"] or 0))

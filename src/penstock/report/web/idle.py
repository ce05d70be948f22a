"""Why ranks are idle, for each rank: what `templates/idle_table.html` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plan.explain import Explanation

_IDLE_NOTE = (
    "Warm-up and drain are the schedule's own; what follows is added by what is uneven, as penstock explain counts it."
)


@dataclass(frozen=True, slots=True)
class Idle:
    """Why ranks are idle: for each rank how long it computes, and how long it idles for each cause, in seconds."""

    computes: tuple[float, ...]
    causes: tuple[Mapping[str, float], ...]
    note: str = ""

    @property
    def names(self) -> list[str]:
        """The causes that make any rank wait for a thousandth of its time or more."""
        every = dict.fromkeys(name for one in self.causes for name in one)
        return [name for name in every if any(one.get(name, 0.0) > 0.001 * self.longest for one in self.causes)]

    def total(self, rank: int) -> float:
        return self.computes[rank] + sum(self.causes[rank].values())

    @property
    def longest(self) -> float:
        """The most time that a rank has."""
        return max(map(self.total, range(len(self.computes))), default=0.0)

    @property
    def share(self) -> float:
        """The share of all ranks' time in which they do not compute; 0 if nothing took any time."""
        whole = sum(map(self.total, range(len(self.computes))))
        return 1 - sum(self.computes) / whole if whole else 0.0

    @property
    def worst(self) -> str:
        """The cause that costs most; empty if none costs anything."""
        sums = {name: sum(one.get(name, 0.0) for one in self.causes) for name in self.names}
        return max(sums, key=sums.__getitem__, default="")


def idle_of(found: Explanation) -> Idle:
    """Why ranks are idle, by `penstock explain`."""
    ranks = found.where.ranks
    causes = tuple({str(reason): value for reason, value in one.idle_seconds.items()} for one in ranks)
    return Idle(tuple(one.compute_seconds for one in ranks), causes, _IDLE_NOTE)

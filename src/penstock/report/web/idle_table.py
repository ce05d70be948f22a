"""Idle time of each rank by cause, for `templates/idle_table.html`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plan import Plan
    from penstock.plan.explain import Explanation


@dataclass(frozen=True, slots=True)
class Idle:
    """Why ranks are idle: for each rank how long it computes, and how long it idles for each cause, in seconds."""

    computes: tuple[float, ...]
    causes: tuple[Mapping[str, float], ...]
    note: str = ""

    @property
    def names(self) -> list[str]:
        """The causes that make any rank wait for a thousandth of its time or more."""
        names = dict.fromkeys(name for causes in self.causes for name in causes)
        return [name for name in names if any(causes.get(name, 0.0) > 0.001 * self.longest for causes in self.causes)]

    @property
    def columns(self) -> list[tuple[str, tuple[float, ...]]]:
        """The table's columns: a heading, and the seconds of each rank."""
        return [("computes", self.computes)] + [
            (name, tuple(causes.get(name, 0.0) for causes in self.causes)) for name in self.names
        ]

    def total(self, rank: int) -> float:
        return self.computes[rank] + sum(self.causes[rank].values())

    @property
    def longest(self) -> float:
        """The longest total time of a rank."""
        return max(map(self.total, range(len(self.computes))), default=0.0)

    @property
    def share(self) -> float:
        """The share of all ranks' time in which they do not compute; 0 if nothing took any time."""
        total_seconds = sum(map(self.total, range(len(self.computes))))
        return 1 - sum(self.computes) / total_seconds if total_seconds else 0.0

    @property
    def worst(self) -> str:
        """The cause that costs most; empty if none costs anything."""
        sums = {name: sum(causes.get(name, 0.0) for causes in self.causes) for name in self.names}
        return max(sums, key=sums.__getitem__, default="")


def explain_idle(explanation: Explanation) -> Idle:
    """Return why ranks are idle, as `penstock explain` does."""
    ranks = explanation.where.ranks
    causes = tuple({str(reason): value for reason, value in rank.idle_seconds.items()} for rank in ranks)
    note = "Warm-up and drain are the schedule's own. The rest is how much longer each rank waits as that makes the "
    note += "pipeline longer, not what it does itself: shares of communication and host overhead are alike."
    return Idle(tuple(rank.compute_seconds for rank in ranks), causes, note)


def predicted_idle(plan: Plan) -> Idle:
    """Return why the ranks of a plan are expected to idle, all together: a plan does not keep those of each."""
    pipeline_seconds = plan.pipeline_seconds
    causes = {cause: share * pipeline_seconds for cause, share in plan.idle.items()}
    return Idle((pipeline_seconds * (1 - plan.bubble),), (causes,), "On average over all ranks.")

"""The figures of a simulated schedule: what `penstock simulate --json` prints and the studio shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock._base.words import counted
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate.computations import Columns
from penstock.simulate.costs import NO_COST, Links, OfStage, StageCost, each_of
from penstock.simulate.memory_use import Peaks, peaks
from penstock.simulate.simulator import timed
from penstock.simulate.waits import CriticalPath, IdleCause, Waits

WORK = (Op.F, Op.B, Op.I, Op.W)


@dataclass(frozen=True)
class SimulationSummary:
    """A simulated schedule and what follows from it, in the units of the costs.

    Attributes:
        by_stage: the cost of each stage, copies included.
        columns: those of the timeline's actions, if they are known.
    """

    schedule: Schedule
    by_stage: Sequence[OfStage]
    timeline: Timeline
    columns: Columns | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, schedule: Schedule, by_stage: Sequence[OfStage], links: Links = NO_COST) -> SimulationSummary:
        """Simulate a schedule. Raise what `simulate` raises."""
        return cls(schedule, by_stage, *timed(schedule, by_stage, links))

    @property
    def peaks(self) -> list[Peaks]:
        """For each rank, the most that it needs of each kind of memory, and at once."""
        return peaks(self.schedule, self.by_stage, self.timeline)

    @cached_property
    def peak_activations(self) -> list[float]:
        """Each rank's peak, in units of one microbatch's activations on all of the rank's stages."""
        placement = self.schedule.placement
        costs = with_activations(placement, self.by_stage)
        held = peaks(self.schedule, costs, self.timeline)
        units = units_of_memory(placement, costs)
        return [one.activations / unit for one, unit in zip(held, units, strict=True)]

    @cached_property
    def _waits(self) -> Waits:
        return Waits.of(self.schedule, self.timeline, self.columns)

    @cached_property
    def idle(self) -> list[dict[IdleCause, float]]:
        return self._waits.idle()

    @cached_property
    def path(self) -> CriticalPath:
        return self._waits.critical_path()

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics, for JSON."""
        path = self.path
        on_path = {op.value: path.seconds(op) for op in WORK if path.seconds(op)}
        return {
            "name": self.schedule.name,
            "ranks": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
            "chunks": chunks(self.schedule),
            "makespan": self.timeline.makespan_seconds,
            "span": self.timeline.span_seconds,
            "bubble_rate": self.timeline.bubble_rate,
            "peak_activations": self.peak_activations,
            "idle": [{cause.value: time for cause, time in by_cause.items()} for by_cause in self.idle],
            "critical_path": {"actions": len(path.spans), **on_path, "link": path.link_seconds},
        }


def chunks(schedule: Schedule) -> int:
    """Stages per rank and copy of the model; the most on any rank, if a file distributes them unevenly."""
    placement = schedule.placement
    return max(-(-len(stages) // placement.pipelines) for stages in placement.by_rank)


def title(schedule: Schedule) -> str:
    """Return a one-line description of the schedule."""
    counts = {"rank": schedule.ranks, "microbatch": schedule.microbatches, "chunk": chunks(schedule)}
    text = ", ".join(counted(count, what) for what, count in counts.items())
    copies = ", two copies of the model" if schedule.placement.pipelines > 1 else ""
    return f"{schedule.name}: {text} a rank{copies}"


def with_activations(placement: Placement, costs: Sequence[OfStage]) -> list[OfStage]:
    """Fill in missing activation sizes: if a rank has none, each counts 1, from the start of F to the end of W."""
    known = {
        rank
        for rank, stage in zip(placement.rank_of, costs, strict=True)
        if any(cost.activation_bytes for cost in each_of(stage))
    }

    known_ones: dict[int, OfStage] = {}  # most stages are one and the same

    def counted_ones(stage: OfStage) -> OfStage:
        if id(stage) not in known_ones:
            made = [replace(c, activation_bytes=1.0, weight_gradient_bytes=1.0) for c in each_of(stage)]
            known_ones[id(stage)] = made[0] if isinstance(stage, StageCost) else made
        return known_ones[id(stage)]

    return [
        stage if rank in known else counted_ones(stage) for rank, stage in zip(placement.rank_of, costs, strict=True)
    ]


def units_of_memory(placement: Placement, costs: Sequence[OfStage]) -> list[float]:
    """Return, for each rank, the activations of one microbatch on all its stages, averaged over the copies of the
    model: a microbatch goes through one of them."""
    held = [0.0] * placement.ranks
    for rank, stage in zip(placement.rank_of, costs, strict=True):
        sizes = [cost.activation_bytes for cost in each_of(stage)]
        held[rank] += (sizes[0] if len(sizes) == 1 else sum(sizes) / len(sizes)) / placement.pipelines
    return held

"""The figures of a simulated schedule: what `penstock simulate --json` prints and the studio shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock._base.formatting import pluralize
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate.computations import Columns
from penstock.simulate.costs import NO_COST, Links, StageCost, StageCosts, as_cost_tuple
from penstock.simulate.memory_use import Peaks, peaks
from penstock.simulate.simulator import simulate_with_columns
from penstock.simulate.waits import CriticalPath, IdleCause, Waits

WORK = (Op.F, Op.B, Op.I, Op.W)


@dataclass(frozen=True)
class SimulationSummary:
    """A simulated schedule and what follows from it, in the units of the costs.

    Attributes:
        by_stage: the cost of each stage, copies included.
        columns: those of the timeline's actions, if they have been built already.
    """

    schedule: Schedule
    by_stage: Sequence[StageCosts]
    timeline: Timeline
    columns: Columns | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, schedule: Schedule, by_stage: Sequence[StageCosts], links: Links = NO_COST) -> SimulationSummary:
        """Simulate a schedule. Raise what `simulate` raises."""
        return cls(schedule, by_stage, *simulate_with_columns(schedule, by_stage, links))

    @property
    def peaks(self) -> list[Peaks]:
        """For each rank, the most that it needs of each kind of memory, and at once."""
        return peaks(self.schedule, self.by_stage, self.timeline)

    @cached_property
    def peak_activations(self) -> list[float]:
        """Each rank's peak, in units of one microbatch's activations on all of the rank's stages."""
        placement = self.schedule.placement
        costs = fill_activation_sizes(placement, self.by_stage)
        rank_peaks = peaks(self.schedule, costs, self.timeline)
        units = memory_units(placement, costs)
        return [peak.activations / unit for peak, unit in zip(rank_peaks, units, strict=True)]

    @cached_property
    def _waits(self) -> Waits:
        return Waits.from_timeline(self.schedule, self.timeline, self.columns)

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
    """Return the stages per rank and copy of the model; the maximum if a file distributes them unevenly."""
    placement = schedule.placement
    return max(-(-len(stages) // placement.pipelines) for stages in placement.by_rank)


def title(schedule: Schedule) -> str:
    """Return a one-line description of the schedule."""
    counts = {"rank": schedule.ranks, "microbatch": schedule.microbatches, "stage": chunks(schedule)}
    text = ", ".join(pluralize(count, noun) for noun, count in counts.items())
    copies = ", two copies of the model" if schedule.placement.pipelines > 1 else ""
    return f"{schedule.name}: {text} per rank{copies}"


def fill_activation_sizes(placement: Placement, costs: Sequence[StageCosts]) -> list[StageCosts]:
    """Fill in missing activation sizes: if a rank has none, each counts 1, from the start of F to the end of W."""
    ranks_with_sizes = {
        rank
        for rank, stage in zip(placement.rank_of, costs, strict=True)
        if any(cost.activation_bytes for cost in as_cost_tuple(stage))
    }

    filled: dict[int, StageCosts] = {}  # most stages share one object

    def fill(stage: StageCosts) -> StageCosts:
        if id(stage) not in filled:
            unit_costs = [replace(c, activation_bytes=1.0, weight_gradient_bytes=1.0) for c in as_cost_tuple(stage)]
            filled[id(stage)] = unit_costs[0] if isinstance(stage, StageCost) else unit_costs
        return filled[id(stage)]

    return [
        stage if rank in ranks_with_sizes else fill(stage) for rank, stage in zip(placement.rank_of, costs, strict=True)
    ]


def memory_units(placement: Placement, costs: Sequence[StageCosts]) -> list[float]:
    """Return, for each rank, the activations of one microbatch on all its stages, averaged over the copies of the
    model: a microbatch goes through one of them."""
    units = [0.0] * placement.ranks
    for rank, stage in zip(placement.rank_of, costs, strict=True):
        sizes = [cost.activation_bytes for cost in as_cost_tuple(stage)]
        units[rank] += (sizes[0] if len(sizes) == 1 else sum(sizes) / len(sizes)) / placement.pipelines
    return units

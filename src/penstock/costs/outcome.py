"""A schedule simulated with `Costs`, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock._base.errors import ArgumentError
from penstock.costs.costs import Costs
from penstock.schedule import Op, Schedule
from penstock.simulate import memory
from penstock.simulate.costs import as_cost_tuple
from penstock.simulate.figures import SimulationSummary
from penstock.simulate.simulator import simulate_with_columns


@dataclass(frozen=True)
class Outcome(SimulationSummary):
    """A schedule simulated with `costs`, which say where its numbers come from and what their units are."""

    costs: Costs = field(kw_only=True)

    @classmethod
    def simulated(cls, schedule: Schedule, costs: Costs) -> Outcome:
        """Simulate a schedule. Raise ArgumentError if the costs do not fit its stages and links."""
        by_stage = costs.of(schedule)
        if any(cost.unsharded_bytes for stage in by_stage for cost in as_cost_tuple(stage)) and not _has_unshard(
            schedule
        ):
            raise ArgumentError(
                f"schedule {schedule.name!r} has no UNSHARD, so it is unknown when full parameters take memory; pass "
                "--unshard-window to add them"
            )
        return cls(schedule, by_stage, *simulate_with_columns(schedule, by_stage, costs.links), costs=costs)

    @property
    def memory_by_kind(self) -> list[dict[str, float]]:
        """For each rank, the most that it needs of each kind, and at once."""
        kinds = ["parameters", "gradients", "optimizer", "activations", *["unsharded"] * _has_unshard(self.schedule)]
        return [{kind: getattr(usage, kind) for kind in kinds} | {"peak": usage.at_once} for usage in self.peaks]

    @property
    def memory_curves(self) -> list[dict[str, list[tuple[float, float]]]]:
        """Each rank's memory by kind over time, for a trace; none if sizes were not given."""
        if not self.costs.has_memory:
            return []
        by_rank = []
        for usage in memory(self.schedule, self.by_stage, self.timeline):
            static = usage.parameters + usage.gradients + usage.optimizer
            curves = {"parameters, gradients, optimizer": [(0.0, static)]} if static else {}
            curves["activations"] = [(0.0, 0.0), *zip(usage.seconds, usage.activations, strict=True)]
            if usage.peak_unsharded:
                curves["gathered parameters"] = [(0.0, 0.0), *zip(usage.seconds, usage.unsharded, strict=True)]
            by_rank.append(curves)
        return by_rank

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics, for JSON."""
        metrics = super().to_dict()
        if self.costs.are_measured:
            metrics["costs"] = self.costs.origin(self.schedule.placement)
            metrics["cuts"] = list(self.costs.cuts(self.schedule.placement))
        if self.costs.assumed:
            metrics["assumed"] = dict(self.costs.assumed)
        if self.costs.has_memory:
            metrics["memory"] = self.memory_by_kind
        return metrics


def _has_unshard(schedule: Schedule) -> bool:
    """Whether the schedule gathers the parameters of sharded stages."""
    return any(code == Op.UNSHARD.code for row in schedule.rows for _, code in row.kinds)


Key = TypeVar("Key")


def with_one_model(
    costs: Costs, schedules: Mapping[Key, Schedule], left_out: Mapping[Key, str], *, whole: bool = False
) -> tuple[dict[Key, Outcome], dict[Key, str]]:
    """Simulate schedules that train the same model, and return why others are left out: as in `left_out`, or since the
    costs do not fit them. `whole`: as for `Costs.for_model_of`. Raise ArgumentError if they fit none."""
    outcomes, reasons = dict[Key, Outcome](), dict(left_out)
    for key, schedule in schedules.items():
        try:
            outcomes[key] = Outcome.simulated(schedule, costs.for_model_of(schedule, whole=whole))
        except ArgumentError as error:
            reasons[key] = str(error)
    if not outcomes:
        raise ArgumentError(next(iter(reasons.values())))
    return outcomes, reasons

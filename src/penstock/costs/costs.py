"""What stages and links cost, as it was given, for any schedule to be simulated with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.costs.links import MeasuredLinks
from penstock.schedule import Placement, Schedule
from penstock.simulate import NO_COST, Links
from penstock.simulate.costs import LinkCost, StageCost, StageCosts, as_cost_tuple, divide_cost

if TYPE_CHECKING:
    from penstock.costs.profile import UnitCost

WORK = {"forward": "F", "backward_input": "I", "backward_weight": "W"}
"""The options for how long a stage works, and the ops they stand for."""


@dataclass(frozen=True, slots=True)
class UnitsToCut:
    """The units of a model for one microbatch, which become the stages of any schedule.

    Attributes:
        units: in the order in which they run.
        action_seconds: what the runtime adds to each forward and backward of a stage.
        description: where they come from, with the microbatch and the device, for people.
    """

    units: tuple[UnitCost, ...]
    action_seconds: float
    description: str


@dataclass(frozen=True, slots=True)
class Costs:
    """What stages and links cost, in the units in which they were given.

    Attributes:
        stages: one cost that applies to every stage, or one per stage, or for each of its microbatches; or the units of
            a model, to be cut into as many stages as there are.
        links: as for `simulate`.
        has_memory: whether any memory cost was given.
        source: where the costs of each stage come from.
        assumed: the keys of `WORK` that were not given although other times were, with the values assumed for them.
    """

    stages: StageCost | tuple[StageCosts, ...] | UnitsToCut
    links: Links
    has_memory: bool = False
    source: str = ""
    assumed: Mapping[str, float] = field(default_factory=dict)

    @property
    def are_alike(self) -> bool:
        """Whether the same numbers apply to all stages, as they do unless a file gives each its own."""
        return isinstance(self.stages, StageCost)

    @property
    def are_measured(self) -> bool:
        """Whether they are of a model's units: in seconds and bytes."""
        return isinstance(self.stages, UnitsToCut)

    def described(self, alike: str, of_stages: str) -> str:
        """Describe costs in tables of several schedules: return one of these two texts, or where they were measured."""
        if isinstance(self.stages, UnitsToCut):
            units = self.stages.description
            return f"{units}, cut for each schedule where its slowest stage is fastest; seconds and bytes"
        return alike if self.are_alike else of_stages

    def origin(self, placement: Placement) -> str:
        """Describe where measured costs come from, and where the stages of this placement begin; empty if they were
        passed in."""
        if not isinstance(self.stages, UnitsToCut):
            return ""
        cuts = self.cuts(placement)
        return f"{self.stages.description}; stages begin at {', '.join(cuts)}" if cuts else self.stages.description

    def cuts(self, placement: Placement) -> tuple[str, ...]:
        """Return where measured units are cut for this placement; empty if costs were passed in."""
        return self._cut_units(self.stages, placement.depth)[0] if isinstance(self.stages, UnitsToCut) else ()

    def _cut_units(
        self, uncut: UnitsToCut, stages: int, name: str = "it", *, splits: bool = False
    ) -> tuple[tuple[str, ...], tuple[StageCost, ...]]:
        """Measured units as the stages of a schedule of that name: see `cut_into_stages`."""
        from penstock.costs.stage_costs import cut_into_stages  # loads numpy

        if stages > len(uncut.units):
            raise ArgumentError(
                f"{self.source} has {pluralize(len(uncut.units), 'unit')}, at most one stage each, but {name} needs "
                f"{stages} stages; use fewer, or split modules: penstock profile --split-inside"
            )
        units = tuple(unit.split for unit in uncut.units) if splits else uncut.units
        return cut_into_stages(units, stages, LinkCost.slowest(self._link_costs), uncut.action_seconds)

    @property
    def assumption(self) -> str:
        """What was assumed, in one line; empty if nothing was."""
        if not self.assumed:
            return ""
        missing = [letter for name, letter in WORK.items() if name in self.assumed]
        present = [letter for name, letter in WORK.items() if name not in self.assumed]
        value = next(iter(self.assumed.values()))
        names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        verb = "was" if len(missing) == 1 else "were"
        return f"{' = '.join([*missing, *present[:1]])} = {value:g}, as {names} {verb} not given"

    def with_links(self, links: MeasuredLinks) -> Costs:
        """Return these costs on a measured network. Raise ArgumentError if they have links already, or no message
        sizes."""
        if self.links != NO_COST:
            raise ArgumentError(f"{self.source} and {links.source} both have links: pass only one of the two")
        costs = replace(self, links=links)
        costs.check_sizes(links.source)
        return costs

    def check_sizes(self, source: str) -> None:
        """Raise ArgumentError if a link from `source` has a bandwidth but no message has a size."""
        if isinstance(self.stages, UnitsToCut):
            return
        stages = [self.stages] if isinstance(self.stages, StageCost) else self.stages
        has_bandwidth = any(link.bytes_per_second < math.inf for link in self._link_costs)
        if has_bandwidth and not any(cost.output_bytes for stage in stages for cost in as_cost_tuple(stage)):
            options = "--output-bytes, or output_bytes in the file of --costs"
            raise ArgumentError(f"{source}: the time of a message depends on its size; pass {options}")

    @property
    def _link_costs(self) -> list[LinkCost]:
        if isinstance(self.links, LinkCost):
            return [self.links]
        return self.links.known if isinstance(self.links, MeasuredLinks) else [*self.links.values()]

    def of(self, schedule: Schedule) -> list[StageCosts]:
        """Return the cost of each of the schedule's stages. Raise ArgumentError if the number of costs differs from the
        number of stages, or a link is of a rank that does not exist."""
        return self.of_stages(schedule.placement, schedule.name, splits=schedule.splits)

    def of_stages(self, placement: Placement, name: str, *, splits: bool) -> list[StageCosts]:
        """Return the cost of each stage, copies included. `splits`: of split backwards. Raise the same errors as `of`,
        with this `name`."""
        depth, costs = placement.depth, self.stages
        if isinstance(costs, UnitsToCut):
            _, costs = self._cut_units(costs, depth, name, splits=splits)
        stages: list[StageCosts] = [costs] * depth if isinstance(costs, StageCost) else list(costs)
        if len(stages) != depth:
            count = pluralize(len(stages), "stage")
            raise ArgumentError(f"{self.source} has {count}, but {name} needs {depth}: list that many")
        self._check_ranks(placement.ranks, name)
        return stages * placement.pipelines

    def _check_ranks(self, ranks: int, name: str) -> None:
        if isinstance(self.links, MeasuredLinks):
            self.links.check(ranks, name)
            return
        for start, end in () if isinstance(self.links, LinkCost) else self.links:
            if max(start, end) >= ranks:
                raise ArgumentError(
                    f"{self.source} has a link from rank {shortened(start)} to rank {shortened(end)}, but the last "
                    f"rank of {name} is {ranks - 1}: correct or remove the link"
                )

    def of_ranks(self, chunks: int) -> Costs:
        """Turn costs per stage into costs per rank, which `for_model_of` divides again. A file's costs stay."""
        if not isinstance(self.stages, StageCost):
            return self
        return replace(self, stages=divide_cost(self.stages, 1 / chunks))

    def for_model_of(self, schedule: Schedule, *, whole: bool = False) -> Costs:
        """Return the costs with which a schedule trains the same model as every other schedule.

        Numbers then apply to a rank, whose chunks share them equally, or if `whole` to the model, whose stages do. The
        stages in a file are the model's; neighbors are merged if the schedule has fewer. Measured units are cut for
        each schedule anyway.

        Raises:
            ArgumentError: the file's stages cannot be merged into as many as the schedule has.
        """
        depth = schedule.placement.depth
        if isinstance(self.stages, StageCost):
            return replace(self, stages=divide_cost(self.stages, depth if whole else depth // schedule.ranks))
        if isinstance(self.stages, UnitsToCut):
            return self
        size, remainder = divmod(len(self.stages), depth)
        if remainder or not size:
            count = pluralize(len(self.stages), "stage")
            raise ArgumentError(f"{self.source} has {count}, which cannot be combined into {depth}")
        merged = (_merge(self.stages[first : first + size]) for first in range(0, len(self.stages), size))
        return replace(self, stages=tuple(merged))


def _merge(stages: Sequence[StageCosts]) -> StageCosts:
    """Merge neighboring stages into one, for each microbatch if one of them differs by it. Raise ArgumentError: two of
    them have costs for different numbers of microbatches."""
    if all(isinstance(stage, StageCost) for stage in stages):
        return _sum([cost for stage in stages for cost in as_cost_tuple(stage)])
    lengths = sorted({len(stage) for stage in stages if not isinstance(stage, StageCost)})
    if len(lengths) > 1:
        raise ArgumentError(
            f"--costs: stages have lists for {lengths[0]} and {lengths[1]} microbatches; expected one length"
        )
    return tuple(_sum([(as_cost_tuple(stage) * lengths[0])[k] for stage in stages]) for k in range(lengths[0]))


def _sum(stages: Sequence[StageCost]) -> StageCost:
    """Add up neighboring stages; the sum's output is the last one's."""
    values = {f.name: [getattr(stage, f.name) for stage in stages] for f in fields(StageCost)}
    sums: dict[str, Any] = {name: None if None in column else sum(column) for name, column in values.items()}
    return StageCost(**{**sums, "output_bytes": stages[-1].output_bytes})

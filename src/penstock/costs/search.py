"""A search with `Costs`: on a loop or a V, within a limit on activations; and named schedules elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock._base.errors import ArgumentError
from penstock.costs.costs import Costs
from penstock.costs.outcome import Outcome
from penstock.schedule import Placement, generate, schedule_specs
from penstock.simulate.costs import StageCost
from penstock.simulate.figures import chunks, fill_activation_sizes, memory_units

if TYPE_CHECKING:
    from penstock.simulate.search import SearchResult

_SLACK = 1e-9


def place(shape: str, ranks: int, chunks: int) -> Placement:
    """Return the placement of a shape, loop or v, of which a V has two stages per rank."""
    return Placement.v(ranks) if shape == "v" else Placement.loop(ranks, chunks)


def describe_placement(placement: Placement) -> str:
    """Describe a placement of `place`."""
    if placement.depth > placement.ranks and placement == Placement.v(placement.ranks):
        return "on a V"
    count = placement.depth // placement.ranks
    return "in a loop" if count == 1 else f"in a loop, {count} stages per rank"


def search_with(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    activation_limit: float | None,
    **settings: Any,
) -> SearchResult:
    """Call `simulate.search.search` with a limit in activations of one microbatch on all of a rank's stages, whatever
    their unit; `settings`: its objective, seconds and seed. Raise ArgumentError if the costs are not such as it
    takes."""
    from penstock.simulate.search import search  # so that --help does not load it

    by_stage = costs.of_stages(placement, f"this placement of {placement.ranks} ranks", splits=True)
    constant = [cost for cost in fill_activation_sizes(placement, by_stage) if isinstance(cost, StageCost)]
    if len(constant) < len(by_stage):
        raise ArgumentError(
            f"{costs.source}: a stage has costs per microbatch, but the search takes one per stage; pass their mean"
        )
    if any(cost.unsharded_bytes for cost in constant):
        raise ArgumentError("--memory-unsharded: the search places no gathers of sharded stages; omit it")
    units = memory_units(placement, constant)
    limit = None if activation_limit is None else [activation_limit * unit for unit in units]
    return search(placement, microbatches, constant, costs.links, memory_limit=limit, **settings)


@dataclass(frozen=True, slots=True)
class ShorterSchedule:
    """A named schedule that is shorter on another placement than a search's: where that is, in words and as an option
    of `penstock search`; `share`: the cost of one of its stages, relative to the search's."""

    name: str
    seconds: float
    where: str
    option: str
    share: float


def shorter_elsewhere(result: SearchResult, costs: Costs, activation_limit: float | None) -> ShorterSchedule | None:
    """Return the shortest named schedule on another placement that the search could try, if it trains the same model
    faster within the limit."""
    from penstock.simulate.search.result import objective_of

    placement, own_chunks = result.schedule.placement, chunks(result.schedule)
    rank_costs = costs.of_ranks(own_chunks)
    max_activations = math.inf if activation_limit is None else activation_limit * (1 + _SLACK)
    limit = result.objective_seconds * (1 - _SLACK)
    best: ShorterSchedule | None = None
    for entry in schedule_specs():
        try:
            schedule = generate(entry.name, placement.ranks, result.schedule.microbatches)
            others = {place("v", placement.ranks, 2), place("loop", placement.ranks, entry.chunks)} - {placement}
            if schedule.placement not in others:
                continue
            outcome = Outcome.simulated(schedule, rank_costs.for_model_of(schedule))
        except ArgumentError:  # not with these numbers, or the stages of the file cannot be merged
            continue
        seconds = objective_of(outcome.timeline, result.objective)
        if seconds < limit and max(outcome.peak_activations) <= max_activations:
            limit, where, count = seconds, describe_placement(schedule.placement), chunks(schedule)
            loop = f"loop --stages-per-rank {count}" if count > 1 else "loop"
            option = f"--placement {'v' if where == 'on a V' else loop}"
            best = ShorterSchedule(schedule.name, seconds, where, option, own_chunks / count)
    return best

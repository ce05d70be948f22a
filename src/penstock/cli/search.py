"""`penstock search`: searches for the best schedule for given costs, within a memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.files import check_writable
from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import CUT, JSON, REQUIRED, options_on, output_option, print_json, screen
from penstock.cli._order import check_search_size
from penstock.cli._outcome import format_all, show
from penstock.costs import Costs, Outcome
from penstock.schedule import MICROBATCHES, Placement, generate, schedule_specs, write_csv
from penstock.schedule.generators import ScheduleParams
from penstock.simulate.costs import StageCost
from penstock.simulate.figures import chunks

if TYPE_CHECKING:
    from penstock.simulate.search import SearchResult

_option = options_on("Search")
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options for the search."""

    ranks: int = _option("Number of ranks.", "--ranks", "-n", default=REQUIRED)
    microbatches: int = _option(f"{CUT}.", default=MICROBATCHES)
    placement: Literal["loop", "v"] = _option(
        "loop: stage s is on rank s % ranks; v: stages go down the ranks and up again, two per rank.", default="loop"
    )
    stages_per_rank: int | None = _option("Stages per rank; default 1 in a loop and 2 on a V.")
    activation_limit: float | None = _option(
        "Maximum activations that a rank may hold; 1 is one microbatch on all its stages."
    )
    objective: Literal["span", "makespan"] = _option(
        "Objective: span (the longest rank, first F to last action) or makespan.", default="span"
    )
    time_limit: float = _option(
        "Seconds to search on a typical machine; a slower one takes longer and finds the same.", default=5.0
    )
    seed: int = _option("The seed of random choices.", default=0)

    def where(self) -> Placement:
        """Return the placement. Raise ArgumentError if an option is wrong, or the search too large."""
        stages = self.stages_per_rank
        check_counts(required=False, ranks=self.ranks, microbatches=self.microbatches, stages_per_rank=stages)
        chunks = 2 if self.placement == "v" else stages or 1
        if stages not in (None, chunks):
            raise ArgumentError(
                f"--stages-per-rank {stages}: a V has exactly 2 stages per rank; omit --stages-per-rank, "
                "or use --placement loop"
            )
        check_search_size(ScheduleParams(self.ranks, self.microbatches, chunks), self.time_limit)
        return Placement.v(self.ranks) if self.placement == "v" else Placement.loop(self.ranks, chunks)

    def answer(self, costs: Costs) -> SearchResult:
        """Run the search, with the memory limit in the costs' unit. Raise ArgumentError if an option is wrong."""
        from penstock.simulate.search.search import search_within  # so that --help does not load it

        if self.activation_limit is not None and not self.activation_limit >= 1:
            raise ArgumentError(
                f"--activation-limit {self.activation_limit:g}: a single microbatch needs 1; pass a number >= 1"
            )
        placement = self.where()
        by_stage = costs.of_stages(placement, f"this placement of {self.ranks} ranks", splits=True)
        constant = [cost for cost in by_stage if isinstance(cost, StageCost)]
        if len(constant) < len(by_stage):
            raise ArgumentError(
                f"{costs.source}: a stage has costs per microbatch, but the search takes one per stage; pass their mean"
            )
        if any(cost.unsharded_bytes for cost in constant):
            raise ArgumentError("--memory-unsharded: the search places no gathers of sharded stages; omit it")
        settings: dict[str, Any] = {"objective": self.objective, "seconds": self.time_limit, "seed": self.seed}
        return search_within(self.activation_limit, placement, self.microbatches, constant, costs.links, **settings)


def search(
    options: SearchOptions,
    costs: CostOptions,
    out: Path | None = output_option("Write the schedule as CSV, as torch and other commands read it.", metavar="FILE"),
    as_json: bool = JSON,
) -> None:
    """Find a good schedule for your costs within a memory limit, and bound its distance from the best.

    It is never worse than a named schedule with the same placement that fits the
    limit; a shorter one with another placement is reported. No schedule with this
    placement is below the lower bound; the gap is the distance to it.
    """
    stage_costs = costs.read(options.microbatches, str(options.ranks))
    check_writable(out, f"--out {out}")
    result = options.answer(stage_costs)
    elsewhere = _shorter_elsewhere(result, stage_costs, options.activation_limit)
    outcome = Outcome(result.schedule, stage_costs.of(result.schedule), result.timeline, costs=stage_costs)
    if as_json:
        metrics = {
            "objective": result.objective,
            "lower_bound": result.lower_bound_seconds,
            "gap": result.gap,
            "seconds": result.search_seconds,
            "seed": options.seed,
            "best_by_name": result.baseline,
            "best_by_name_objective": result.baseline_seconds if result.baseline else None,
            "placement": options.placement,
            "shorter_elsewhere": elsewhere,
        }
        print_json(outcome.to_dict() | metrics)
    else:
        show(outcome, screen(), _summary(result, elsewhere, measured=stage_costs.are_measured))
    if out is not None:
        write_csv(result.schedule, out)


def _shorter_elsewhere(result: SearchResult, costs: Costs, memory_limit: float | None) -> dict[str, Any] | None:
    """Return the shortest named schedule on another placement that the search could try, if it trains the same model
    faster within the memory limit. `share`: the cost of one of its stages, relative to one of the search's."""
    ranks, per_rank = result.schedule.ranks, chunks(result.schedule)
    rank_costs, limit = costs.of_ranks(per_rank), result.objective_seconds * (1 - _SLACK)
    best: dict[str, Any] | None = None
    for entry in schedule_specs():
        extra = f" --stages-per-rank {entry.chunks}" if entry.chunks > 1 else ""
        placements = {
            "--placement v": Placement.v(ranks),
            f"--placement loop{extra}": Placement.loop(ranks, entry.chunks),
        }
        try:
            schedule = generate(entry.name, ranks, result.schedule.microbatches)
            option = next((option for option, candidate in placements.items() if candidate == schedule.placement), None)
            if option is None or schedule.placement == result.schedule.placement:
                continue
            outcome = Outcome.simulated(schedule, rank_costs.for_model_of(schedule))
        except ArgumentError:  # not with these numbers, or the stages of the file cannot be merged
            continue
        timeline, max_activations = outcome.timeline, math.inf if memory_limit is None else memory_limit * (1 + _SLACK)
        seconds = timeline.makespan_seconds if result.objective == "makespan" else timeline.span_seconds
        if seconds < limit and max(outcome.peak_activations) <= max_activations:
            limit, location, share = seconds, _describe(schedule.placement), per_rank / chunks(schedule)
            best = {"name": schedule.name, "seconds": seconds, "where": location, "option": option, "share": share}
    return best


def _summary(result: SearchResult, elsewhere: dict[str, Any] | None, *, measured: bool = False) -> dict[str, str]:
    """Return the lines that a search adds to its schedule's metrics. `measured`: costs are cut for each placement."""
    (bound,) = format_all([result.lower_bound_seconds])
    lines = {
        "placement": f"{_describe(result.schedule.placement)}; bound and baseline hold for this placement only",
        "lower bound": f"{bound} for the {result.objective}; gap {result.gap:.2%}",
        "search time": f"{result.search_seconds:.1f} s",
    }
    if result.baseline is not None:
        shorter = result.objective_seconds < result.baseline_seconds
        difference = (
            f"{result.baseline_seconds / result.objective_seconds - 1:.1%} longer than this" if shorter else "as short"
        )
        lines["best named"] = f"{result.baseline}: {difference}"
    if elsewhere is not None:
        saved, (seconds,) = 1 - elsewhere["seconds"] / result.objective_seconds, format_all([elsewhere["seconds"]])
        text = f"{elsewhere['name']} {elsewhere['where']} is {saved:.1%} shorter: {seconds}; use {elsewhere['option']}"
        if elsewhere["share"] != 1 and not measured:
            text += f", and multiply the costs by {elsewhere['share']:g}, since they are per stage"
        lines["alternative"] = text
    return lines


def _describe(placement: Placement) -> str:
    """Describe a placement: a loop or a V."""
    if placement.depth > placement.ranks and placement == Placement.v(placement.ranks):
        return "on a V"
    count = placement.depth // placement.ranks
    return "in a loop" if count == 1 else f"in a loop, {count} stages per rank"

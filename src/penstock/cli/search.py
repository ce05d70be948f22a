"""`penstock search`: searches for the best schedule for given costs, within a memory limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.files import check_writable
from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import CUT, JSON, REQUIRED, options_on, output_option, print_json, screen
from penstock.cli._outcome import show
from penstock.cli._schedule_options import check_search_size
from penstock.costs import Outcome
from penstock.costs.search import ShorterSchedule, describe_placement, place, search_with, shorter_elsewhere
from penstock.report.text import format_all
from penstock.schedule import MICROBATCHES, write_csv
from penstock.schedule.generators import ScheduleParams

if TYPE_CHECKING:
    from penstock.simulate.search import SearchResult

_option = options_on("Search")


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

    def chunks(self) -> int:
        """Return the stages per rank. Raise ArgumentError if an option is wrong, or the search too large."""
        stages = self.stages_per_rank
        check_counts(required=False, ranks=self.ranks, microbatches=self.microbatches, stages_per_rank=stages)
        chunks = 2 if self.placement == "v" else stages or 1
        if stages not in (None, chunks):
            raise ArgumentError(
                f"--stages-per-rank {stages}: a V has exactly 2 stages per rank; omit --stages-per-rank, "
                "or use --placement loop"
            )
        check_search_size(ScheduleParams(self.ranks, self.microbatches, chunks), self.time_limit)
        return chunks


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
    limit = options.activation_limit
    if limit is not None and not limit >= 1:
        raise ArgumentError(f"--activation-limit {limit:g}: a single microbatch needs 1; pass a number >= 1")
    placement = place(options.placement, options.ranks, options.chunks())
    settings = {"objective": options.objective, "seconds": options.time_limit, "seed": options.seed}
    result = search_with(stage_costs, placement, options.microbatches, limit, **settings)
    elsewhere = shorter_elsewhere(result, stage_costs, limit)
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
            "shorter_elsewhere": None if elsewhere is None else asdict(elsewhere),
        }
        print_json(outcome.to_dict() | metrics)
    else:
        show(outcome, screen(), _summary(result, elsewhere, measured=stage_costs.are_measured))
    if out is not None:
        write_csv(result.schedule, out)


def _summary(result: SearchResult, elsewhere: ShorterSchedule | None, *, measured: bool) -> dict[str, str]:
    """Return the lines that a search adds to its schedule's metrics. `measured`: costs are cut for each placement."""
    where, (bound,) = describe_placement(result.schedule.placement), format_all([result.lower_bound_seconds])
    lines = {
        "placement": f"{where}; bound and baseline hold for this placement only",
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
        saved, (seconds,) = 1 - elsewhere.seconds / result.objective_seconds, format_all([elsewhere.seconds])
        text = f"{elsewhere.name} {elsewhere.where} is {saved:.1%} shorter: {seconds}; use {elsewhere.option}"
        if elsewhere.share != 1 and not measured:
            text += f", and multiply the costs by {elsewhere.share:g}, since they are per stage"
        lines["alternative"] = text
    return lines

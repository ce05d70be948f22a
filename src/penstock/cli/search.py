"""`penstock search`: finds the best schedule it can for given costs, within a memory limit."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console

from penstock.cli._cost_options import EPILOG as EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import CUT, Json, options_on, output_option, spread
from penstock.cli._order import weigh_search
from penstock.cli._other_placements import ShorterSchedule, place, shorter
from penstock.cli._outcome import format_of, show
from penstock.costs import Costs, Outcome
from penstock.errors import ArgumentError, check_counts
from penstock.schedule import MICROBATCHES, Placement, write_csv
from penstock.simulate.costs import StageCost

if TYPE_CHECKING:
    from penstock.simulate.search import Found

_option = options_on("What to look for")


@dataclass(frozen=True, slots=True)
class Question:
    """What to look for."""

    ranks: Annotated[int, _option("How many ranks.", "--ranks", "-n")]
    microbatches: Annotated[int, _option(f"{CUT}.")] = MICROBATCHES
    placement: Annotated[
        Literal["loop", "v"],
        _option("loop: stage s is on rank s % ranks; v: stages go down the ranks and up again, two per rank."),
    ] = "loop"
    chunks: Annotated[int | None, _option("Stages per rank; default 1 in a loop and 2 on a V.")] = None
    memory_limit: Annotated[
        float | None, _option("The most activations that a rank may hold; 1 is one microbatch on all its stages.")
    ] = None
    objective: Annotated[
        Literal["span", "makespan"], _option("Objective: span (the longest rank, first F to last action) or makespan.")
    ] = "span"
    seconds: Annotated[
        float, _option("How long to search on a usual machine; slower ones take longer and find the same.")
    ] = 5.0
    seed: Annotated[int, _option("The seed of random choices.")] = 0

    def where(self) -> Placement:
        """The placement. Raises ArgumentError if an option is wrong, or if there is too much to search."""
        check_counts(required=False, ranks=self.ranks, microbatches=self.microbatches, chunks=self.chunks)
        chunks = 2 if self.placement == "v" else self.chunks or 1
        if self.chunks not in (None, chunks):
            raise ArgumentError(
                f"--chunks {self.chunks}: a V has exactly 2 chunks per rank; leave --chunks out, or take the loop"
            )
        weigh_search(self.ranks, self.microbatches, chunks, self.seconds)
        return Placement.v(self.ranks) if self.placement == "v" else Placement.loop(self.ranks, chunks)


@spread
def search(
    question: Question,
    costs: CostOptions,
    csv: Annotated[
        Path | None, output_option("Write the schedule, as torch and --csv read it.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find a good schedule for your costs within a memory limit, and say how far it may be from the best.

    It is never worse than a named schedule with the same placement that fits the
    limit; if one with another placement is shorter, it says so. No schedule with
    this placement is below the lower bound; the gap is the distance to it.
    """
    known = costs.read(question.microbatches, str(question.ranks))
    if csv is not None and (csv.is_dir() or not os.access(csv.parent, os.W_OK)):  # before a long search, not after
        raise ArgumentError(f"--csv {csv}: this file cannot be written; pass one in a writable folder")
    found = answer(question, known)
    elsewhere = shorter(found, known, question.memory_limit)
    outcome = Outcome(found.schedule, known.of(found.schedule), found.timeline, costs=known)
    if as_json:
        figures = {
            "objective": found.objective,
            "lower_bound": found.lower_bound_seconds,
            "gap": found.gap,
            "seconds": found.search_seconds,
            "seed": question.seed,
            "best_by_name": found.known,
            "best_by_name_objective": found.known_seconds if found.known else None,
            "placement": question.placement,
            "shorter_elsewhere": None if elsewhere is None else asdict(elsewhere),
        }
        print(json.dumps(outcome.to_dict() | figures))
    else:
        show(outcome, Console(highlight=False), summary(found, elsewhere, measured=known.are_measured))
    if csv is not None:
        write_csv(found.schedule, csv)


def answer(question: Question, costs: Costs) -> Found:
    """Searches, converting the memory limit to the costs' unit. Raises ArgumentError: an option is wrong."""
    from penstock.simulate.search.search import search_within  # so that --help does not load it

    if costs.contended:
        raise ArgumentError("--contended: the search does not model contention on links; leave it out")
    limit = question.memory_limit
    if limit is not None and math.isnan(limit):
        raise ArgumentError("--memory-limit nan: expected a number, such as 1.5")
    if limit is not None and not limit >= 1:
        raise ArgumentError(f"--memory-limit {limit:g}: a single microbatch needs 1; pass a number >= 1")
    where = question.where()
    of_stages = costs.of_stages(where, f"this placement of {question.ranks} ranks", splits=True)
    one_each = [cost for cost in of_stages if isinstance(cost, StageCost)]
    if len(one_each) < len(of_stages):
        raise ArgumentError(
            f"{costs.source}: a stage has costs by microbatch, but the search takes one for each stage; pass their mean"
        )
    if any(cost.unsharded_bytes for cost in one_each):
        raise ArgumentError("--memory-unsharded: the search places no gathers of sharded stages; leave it out")
    return search_within(
        limit,
        where,
        question.microbatches,
        one_each,
        costs.links,
        objective=question.objective,
        seconds=question.seconds,
        seed=question.seed,
    )


def summary(found: Found, elsewhere: ShorterSchedule | None, *, measured: bool = False) -> dict[str, str]:
    """What a search adds to its schedule's figures, one line each. `measured`: costs are cut for each placement."""
    bound = format_of([found.lower_bound_seconds])(found.lower_bound_seconds)
    lines = {
        "placement": f"{place(found.schedule.placement)}; bound and baseline hold for this placement only",
        "lower bound": f"{bound} for the {found.objective}; gap {found.gap:.2%}",
        "search time": f"{found.search_seconds:.1f} s",
    }
    if found.known is not None:
        shorter = found.objective_seconds < found.known_seconds
        gain = f"{found.known_seconds / found.objective_seconds - 1:.1%} longer than this" if shorter else "as short"
        lines["best named"] = f"{found.known}: {gain}"
    if elsewhere is not None:
        seconds = format_of([elsewhere.seconds])(elsewhere.seconds)
        less = f"{1 - elsewhere.seconds / found.objective_seconds:.1%}"
        scaled = f", and multiply the costs by {elsewhere.share:g}, since they are per stage"
        costs = "" if elsewhere.share == 1 or measured else scaled
        lines["alternative"] = (
            f"{elsewhere.name} {elsewhere.where} is {less} shorter: {seconds}; take {elsewhere.option}{costs}"
        )
    return lines

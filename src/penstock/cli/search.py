"""`penstock search`: finds the best schedule it can for given costs, within a memory limit."""

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
from penstock.cli._order import weigh_search
from penstock.cli._outcome import show, texts
from penstock.costs import Costs, Outcome
from penstock.schedule import MICROBATCHES, Placement, generate, generators, write_csv
from penstock.schedule.generators import Numbers
from penstock.simulate.costs import StageCost
from penstock.simulate.figures import chunks

if TYPE_CHECKING:
    from penstock.simulate.search import Found

_option = options_on("Search")
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Question:
    """What to look for."""

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
        """The placement. Raises ArgumentError if an option is wrong, or if there is too much to search."""
        given = self.stages_per_rank
        check_counts(required=False, ranks=self.ranks, microbatches=self.microbatches, stages_per_rank=given)
        chunks = 2 if self.placement == "v" else given or 1
        if given not in (None, chunks):
            raise ArgumentError(
                f"--stages-per-rank {given}: a V has exactly 2 stages per rank; omit --stages-per-rank, "
                "or use --placement loop"
            )
        weigh_search(Numbers(self.ranks, self.microbatches, chunks), self.time_limit)
        return Placement.v(self.ranks) if self.placement == "v" else Placement.loop(self.ranks, chunks)

    def answer(self, costs: Costs) -> Found:
        """Searches, converting the memory limit to the costs' unit. Raises ArgumentError: an option is wrong."""
        from penstock.simulate.search.search import search_within  # so that --help does not load it

        if self.activation_limit is not None and not self.activation_limit >= 1:
            raise ArgumentError(
                f"--activation-limit {self.activation_limit:g}: a single microbatch needs 1; pass a number >= 1"
            )
        where = self.where()
        of_stages = costs.of_stages(where, f"this placement of {self.ranks} ranks", splits=True)
        one_each = [cost for cost in of_stages if isinstance(cost, StageCost)]
        if len(one_each) < len(of_stages):
            raise ArgumentError(
                f"{costs.source}: a stage has costs per microbatch, but the search takes one per stage; pass their mean"
            )
        if any(cost.unsharded_bytes for cost in one_each):
            raise ArgumentError("--memory-unsharded: the search places no gathers of sharded stages; omit it")
        how: dict[str, Any] = {"objective": self.objective, "seconds": self.time_limit, "seed": self.seed}
        return search_within(self.activation_limit, where, self.microbatches, one_each, costs.links, **how)


def search(
    question: Question,
    costs: CostOptions,
    out: Path | None = output_option("Write the schedule as CSV, as torch and other commands read it.", metavar="FILE"),
    as_json: bool = JSON,
) -> None:
    """Find a good schedule for your costs within a memory limit, and bound its distance from the best.

    It is never worse than a named schedule with the same placement that fits the
    limit; a shorter one with another placement is reported. No schedule with this
    placement is below the lower bound; the gap is the distance to it.
    """
    known = costs.read(question.microbatches, str(question.ranks))
    check_writable(out, f"--out {out}")
    found = question.answer(known)
    elsewhere = _shorter_elsewhere(found, known, question.activation_limit)
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
            "shorter_elsewhere": elsewhere,
        }
        print_json(outcome.to_dict() | figures)
    else:
        show(outcome, screen(), _summary(found, elsewhere, measured=known.are_measured))
    if out is not None:
        write_csv(found.schedule, out)


def _shorter_elsewhere(found: Found, costs: Costs, memory_limit: float | None) -> dict[str, Any] | None:
    """The shortest named schedule on another placement that the search could try, if it trains the same model within
    the memory limit in less time. `share`: what one of its stages costs, relative to one of the search's."""
    ranks, own = found.schedule.ranks, chunks(found.schedule)
    of_ranks, limit = costs.of_ranks(own), found.objective_seconds * (1 - _SLACK)
    best: dict[str, Any] | None = None
    for entry in generators():
        more = f" --stages-per-rank {entry.chunks}" if entry.chunks > 1 else ""
        places = {"--placement v": Placement.v(ranks), f"--placement loop{more}": Placement.loop(ranks, entry.chunks)}
        try:
            schedule = generate(entry.name, ranks, found.schedule.microbatches)
            option = next((option for option, place in places.items() if place == schedule.placement), None)
            if option is None or schedule.placement == found.schedule.placement:
                continue
            outcome = Outcome.simulated(schedule, of_ranks.for_model_of(schedule))
        except ArgumentError:  # not with these numbers, or the file's stages cannot be merged into these
            continue
        timeline, most = outcome.timeline, math.inf if memory_limit is None else memory_limit * (1 + _SLACK)
        seconds = timeline.makespan_seconds if found.objective == "makespan" else timeline.span_seconds
        if seconds < limit and max(outcome.peak_activations) <= most:
            limit, where, share = seconds, _place(schedule.placement), own / chunks(schedule)
            best = {"name": schedule.name, "seconds": seconds, "where": where, "option": option, "share": share}
    return best


def _summary(found: Found, elsewhere: dict[str, Any] | None, *, measured: bool = False) -> dict[str, str]:
    """What a search adds to its schedule's figures, one line each. `measured`: costs are cut for each placement."""
    (bound,) = texts([found.lower_bound_seconds])
    lines = {
        "placement": f"{_place(found.schedule.placement)}; bound and baseline hold for this placement only",
        "lower bound": f"{bound} for the {found.objective}; gap {found.gap:.2%}",
        "search time": f"{found.search_seconds:.1f} s",
    }
    if found.known is not None:
        shorter = found.objective_seconds < found.known_seconds
        gain = f"{found.known_seconds / found.objective_seconds - 1:.1%} longer than this" if shorter else "as short"
        lines["best named"] = f"{found.known}: {gain}"
    if elsewhere is not None:
        less, (seconds,) = 1 - elsewhere["seconds"] / found.objective_seconds, texts([elsewhere["seconds"]])
        text = f"{elsewhere['name']} {elsewhere['where']} is {less:.1%} shorter: {seconds}; use {elsewhere['option']}"
        if elsewhere["share"] != 1 and not measured:
            text += f", and multiply the costs by {elsewhere['share']:g}, since they are per stage"
        lines["alternative"] = text
    return lines


def _place(placement: Placement) -> str:
    """A placement in words: a loop or a V."""
    if placement.depth > placement.ranks and placement == Placement.v(placement.ranks):
        return "on a V"
    each = placement.depth // placement.ranks
    return "in a loop" if each == 1 else f"in a loop, {each} stages per rank"

"""Whether a schedule with a name beats what a search has found, on another placement: a search looks at one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli._costs import Costs
from penstock.cli._outcome import Outcome, chunks
from penstock.errors import ArgumentError
from penstock.schedule import Placement, Schedule, generate, generators

if TYPE_CHECKING:
    from penstock.search import Found

_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A schedule with a name that is shorter.

    Attributes:
        name: the schedule's.
        seconds: its objective, where every rank works as long as in what was found.
        where: its placement, in words.
        option: with which `penstock search` looks there.
        share: what its stages cost, of what those of the search do.
    """

    name: str
    seconds: float
    where: str
    option: str
    share: float


def shorter(found: Found, costs: Costs, memory_limit: float | None) -> Elsewhere | None:
    """The shortest that has as many ranks and microbatches, trains the same model and fits; None if none is shorter.

    Those with two copies of the model or with slices are left out: they need more memory for parameters, or run only
    with models that can be cut so.

    Args:
        found: by the search.
        costs: that it was given, of its stages.
        memory_limit: in activations of one microbatch on all stages of a rank.
    """
    own = chunks(found.schedule)
    of_ranks = costs.of_ranks(own)
    best: Elsewhere | None = None
    limit = found.objective_seconds * (1 - _SLACK)
    for schedule, where, option in _others(found.schedule):
        try:
            outcome = Outcome.of(schedule, of_ranks.for_model_of(schedule))
        except ArgumentError:  # a file's stages make no such stages
            continue
        if memory_limit is not None and max(outcome.peak_activations) > memory_limit * (1 + _SLACK):
            continue
        timeline = outcome.timeline
        seconds = timeline.makespan_seconds if found.objective == "makespan" else timeline.span_seconds
        if seconds < limit:
            best, limit = Elsewhere(schedule.name, seconds, where, option, own / chunks(schedule)), seconds
    return best


def _others(found: Schedule) -> Iterator[tuple[Schedule, str, str]]:
    """The schedules of other placements on which a search can look, each with its place in words and as an option."""
    for entry in generators():
        if entry.slices > 1 or entry.placement == "bidirectional":
            continue
        try:
            schedule = generate(entry.name, found.ranks, found.microbatches)
        except ArgumentError:  # not with these numbers
            continue
        if schedule.placement == found.placement:
            continue
        if schedule.placement == Placement.v(found.ranks):
            yield schedule, "on a V", "--placement v"
        elif schedule.placement == Placement.loop(found.ranks, entry.chunks):
            more = f" --chunks {entry.chunks}" if entry.chunks > 1 else ""
            yield schedule, place(schedule.placement), f"--placement loop{more}"


def place(placement: Placement) -> str:
    """Where stages are, in words, of a loop or a V."""
    if placement.depth > placement.ranks and placement == Placement.v(placement.ranks):
        return "on a V"
    each = placement.depth // placement.ranks
    return "in a loop" if each == 1 else f"in a loop of {each} chunks a rank"

"""Whether a named schedule on another placement beats what a search found: a search tries only one placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.costs import Costs, Outcome
from penstock.errors import ArgumentError
from penstock.schedule import Placement, Schedule, generate, generators
from penstock.simulate.figures import chunks

if TYPE_CHECKING:
    from penstock.simulate.search import Found

_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class ShorterSchedule:
    """A named schedule that is shorter than the one found.

    Attributes:
        name: the schedule's name.
        seconds: its objective, if every rank works as long as in the schedule found.
        where: its placement, in words.
        option: the option that makes `penstock search` look there.
        share: what one of its stages costs, relative to one of the search's.
    """

    name: str
    seconds: float
    where: str
    option: str
    share: float


def shorter(found: Found, costs: Costs, memory_limit: float | None) -> ShorterSchedule | None:
    """The shortest named schedule that trains the same model within the memory limit; None if none beats the search.

    It has the same number of ranks and microbatches. Schedules with two copies of the model, or with slices, are left
    out: they need more memory for parameters, or a model that can be sliced.

    Args:
        found: what the search found.
        costs: the costs that the search was given, per stage.
        memory_limit: in activations of one microbatch on all stages of a rank.
    """
    own = chunks(found.schedule)
    of_ranks = costs.of_ranks(own)
    best: ShorterSchedule | None = None
    limit = found.objective_seconds * (1 - _SLACK)
    for schedule, where, option in _others(found.schedule):
        try:
            outcome = Outcome.simulated(schedule, of_ranks.for_model_of(schedule))
        except ArgumentError:  # the file's stages cannot be merged into these
            continue
        if memory_limit is not None and max(outcome.peak_activations) > memory_limit * (1 + _SLACK):
            continue
        timeline = outcome.timeline
        seconds = timeline.makespan_seconds if found.objective == "makespan" else timeline.span_seconds
        if seconds < limit:
            best, limit = ShorterSchedule(schedule.name, seconds, where, option, own / chunks(schedule)), seconds
    return best


def _others(found: Schedule) -> Iterator[tuple[Schedule, str, str]]:
    """Named schedules on other placements that a search can try, each with its placement in words and as an option."""
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
    """A placement in words: a loop or a V."""
    if placement.depth > placement.ranks and placement == Placement.v(placement.ranks):
        return "on a V"
    each = placement.depth // placement.ranks
    return "in a loop" if each == 1 else f"in a loop of {each} chunks a rank"

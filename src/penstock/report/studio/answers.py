"""The answer to each question of the page, as plain values for JSON. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.report import make_panel, svg, to_perfetto, walkthrough
from penstock.report.studio.question import MAX_CELLS, MAX_SECONDS, MAX_TO_SEARCH, Question
from penstock.report.web.timeline_data import Order, band, curve, timeline_data
from penstock.schedule import Placement, Schedule, generate, schedule_specs, to_csv
from penstock.schedule.generators import ScheduleParams
from penstock.simulate import LinkCost, StageCost, memory
from penstock.simulate.costs import divide_cost
from penstock.simulate.figures import SimulationSummary, fill_activation_sizes, memory_units
from penstock.simulate.search import SearchResult
from penstock.simulate.search.search import search_within

SEARCHED = "search"
"""The name of a schedule that was searched for."""


def catalog() -> dict[str, Any]:
    """Return every named schedule, and the default query."""
    known = [
        {
            "name": one.name,
            "rule": one.rule,
            "comparable": one.placement != "bidirectional",
        }
        for one in schedule_specs()
    ]
    return {"schedules": known, "usual": asdict(Question())}


def stage_costs(question: Question, placement: Placement) -> list[StageCost]:
    """Return the cost of each stage, copies included."""
    per_rank = StageCost(question.forward, question.backward_input, question.backward_weight)
    one = divide_cost(per_rank, placement.depth // placement.ranks)
    times = ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")
    last = replace(one, **{name: getattr(one, name) + question.head * getattr(per_rank, name) for name in times})
    return [*[one] * (placement.depth - 1), last] * placement.pipelines


@lru_cache(maxsize=64)
def named(question: Question, name: str) -> SimulationSummary:
    """Simulate one of a query's schedules. Raise ArgumentError if it is not one, or its definition does not allow
    it."""
    entry = next((one for one in question.entries() if one.name == name), None)
    if entry is None:
        raise ArgumentError(f"schedule={name[:40]!r} is not in the question: {', '.join(question.schedules)}")
    return _figures(question, _generated(name, question.numbers(entry)))


@lru_cache(maxsize=64)
def _generated(name: str, numbers: ScheduleParams) -> Schedule:
    """Cache what stays the same while only costs change."""
    return generate(name, numbers.ranks, numbers.microbatches, numbers.stages_per_rank)


def _figures(question: Question, schedule: Schedule) -> SimulationSummary:
    costs = stage_costs(question, schedule.placement)
    return SimulationSummary.of(schedule, costs, LinkCost(question.comm))


def simulate(question: Question) -> dict[str, Any]:
    """Simulate every schedule of a query on one time axis: `penstock simulate`'s metrics, and what a timeline shows."""
    found, refused = [], []
    for entry in question.entries():
        if reason := entry.refusal(question.numbers(entry)):
            refused.append({"name": entry.name, "reason": reason})
        else:
            found.append(named(question, entry.name))
    return {
        "schedules": [_described(question, one) for one in found],
        "not_allowed": refused,
        "timeline": timeline_data([_band(question, one) for one in found], unit="units"),
    }


def _described(question: Question, one: SimulationSummary) -> dict[str, Any]:
    return one.to_dict() | {"fits": fits(question, one)}


def fits(question: Question, one: SimulationSummary) -> bool:
    """Whether every rank keeps to the memory limit."""
    limit = math.inf if question.memory_limit is None else question.memory_limit
    return max(one.peak_activations) <= limit * (1 + 1e-9)


def _band(question: Question, one: SimulationSummary) -> dict[str, Any]:
    placement = one.schedule.placement
    costs = fill_activation_sizes(placement, one.by_stage)
    units = memory_units(placement, costs)
    curves = []
    for held, unit in zip(memory(one.schedule, costs, one.timeline), units, strict=True):
        made = curve(held, question.memory_limit, unit="", label="activations")
        curves.append(made | {"bytes": made["bytes"] / unit})  # 1 is one microbatch on all of a rank's stages
    note = f"span {one.timeline.span_seconds:.4g}, bubble {one.timeline.bubble_rate:.1%}"
    order = _order(one.schedule)
    return band(one.schedule.name, one.timeline, one.schedule, path=one.path, memory=curves, note=note, order=order)


@lru_cache(maxsize=64)
def _order(schedule: Schedule) -> Order:
    """Cache what stays the same while only costs change."""
    return Order.of(schedule.rows, schedule).packed()


# -- search -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def searched(question: Question, where: str, seconds: float) -> tuple[SearchResult, SimulationSummary]:
    """Search for the best schedule for a query's costs within its memory limit. Raise ArgumentError if there is too
    much to search, the limit leaves no room, or stages are neither in a loop nor on a V."""
    if where not in ("loop", "v"):
        raise ArgumentError(f"placement={where[:20]!r}: expected loop or v")
    if not 0 < seconds <= MAX_SECONDS:
        raise ArgumentError(f"seconds={seconds:g}: the studio searches up to {MAX_SECONDS:g} s; `penstock search` more")
    chunks = 2 if where == "v" else question.chunks or 1
    actions = 3 * question.ranks * question.microbatches * chunks
    if actions > MAX_TO_SEARCH:
        raise ArgumentError(
            f"{question.size}: a schedule has {actions:,} actions, and the studio searches up to {MAX_TO_SEARCH:,}; "
            f"take fewer, or use `penstock search`"
        )
    placement = Placement.v(question.ranks) if where == "v" else Placement.loop(question.ranks, chunks)
    costs, links = stage_costs(question, placement), LinkCost(question.comm)
    limit, microbatches = question.memory_limit, question.microbatches
    found = search_within(limit, placement, microbatches, costs, links, objective="span", seconds=seconds)
    made = found.schedule
    return found, _figures(question, Schedule(SEARCHED, made.placement, made.microbatches, made.rows))


def search_for(question: Question, where: str, seconds: float) -> dict[str, Any]:
    """Return the result of a search, its metrics, its timeline, and how far it may be from the best."""
    found, figures = searched(question, where, seconds)
    return {
        "schedules": [_described(question, figures)],
        "timeline": timeline_data([_band(question, figures)], unit="units"),
        "lower_bound": found.lower_bound_seconds,
        "gap": found.gap,
        "is_named": found.schedule.name if found.schedule.name != SEARCHED else None,
    }


# -- walk-through -----------------------------------------------------------------------------------------------------


def walk(question: Question) -> dict[str, Any]:
    """Describe the slots of a query's schedules in words. Raise ArgumentError if there are too many slots and ranks to
    read."""
    walks, cells = [], 0
    for entry in question.entries():
        if reason := entry.refusal(question.numbers(entry)):
            raise ArgumentError(f"{entry.name} {reason}")
        found = walkthrough(named(question, entry.name).schedule)
        cells += found.slots * question.ranks
        if cells > MAX_CELLS:
            raise ArgumentError(
                f"{entry.name} with {question.size} has {found.slots} slots, too many to go through; "
                f"take fewer microbatches (up to {MAX_CELLS:,} cells are shown)"
            )
        ranks: list[list[dict[str, Any]]] = []
        for moments in found.ranks:
            ranks.append([{"text": one.text, "needs": [[a.rank, a.slot] for a in one.needs]} for one in moments])
            for cell, action in zip(ranks[-1], (one.action for one in moments), strict=True):
                if action is not None:
                    cell |= {"op": action.op.value, "label": f"{action.op.value}{action.microbatch or 0}"}
        longest = max(len(str(action.microbatch or 0)) for action in found.schedule.rows[0])
        walks.append(
            {
                "name": entry.name,
                "rule": entry.rule,
                "longest": 1 + longest,
                "slots": found.slots,
                "headlines": [found.headline(slot) for slot in range(found.slots)],
                "ranks": ranks,
            }
        )
    return {"walks": walks}


# -- files ------------------------------------------------------------------------------------------------------------

_FILES: Mapping[str, tuple[str, str, Callable[[SimulationSummary], str]]] = {
    "csv": ("csv", "text/csv", lambda one: to_csv(one.schedule)),
    "svg": ("svg", "image/svg+xml", lambda one: svg([make_panel(one.schedule, one.timeline)], "units")),
    "perfetto": ("perfetto.json", "application/json", lambda one: json.dumps(to_perfetto(one.timeline))),
}
"""How a file's name ends, its type, and what is in it. Of the SVG the page makes a PNG."""


def export(figures: SimulationSummary, kind: str) -> tuple[str, str, str]:
    """Export a simulated schedule as a file of this kind: return its name, its type, and its content.

    Raises:
        ArgumentError: there is no such kind.
        ScheduleError: a CSV cannot say what the schedule has.
    """
    if kind not in _FILES:
        raise ArgumentError(f"export {kind[:20]!r}: expected {', '.join(_FILES)}")
    ending, media_type, write = _FILES[kind]
    schedule = figures.schedule
    return f"{schedule.name}-p{schedule.ranks}-m{schedule.microbatches}.{ending}", media_type, write(figures)

"""The answer to each query of the page, as plain values for JSON. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.costs import Costs
from penstock.costs.search import place, search_with
from penstock.report import make_panel, svg, to_perfetto, walkthrough
from penstock.report.studio.query import MAX_CELLS, MAX_SECONDS, MAX_TO_SEARCH, SimulationQuery
from penstock.report.web.timeline_data import Order, band, curve, timeline_data
from penstock.schedule import Placement, Schedule, generate, schedule_specs, to_csv
from penstock.schedule.generators import ScheduleParams
from penstock.simulate import LinkCost, StageCost, memory
from penstock.simulate.costs import divide_cost
from penstock.simulate.figures import SimulationSummary, fill_activation_sizes, memory_units
from penstock.simulate.search import SearchResult

SEARCHED = "search"
"""The name of a schedule that was searched for."""


def catalog() -> dict[str, Any]:
    """Return every named schedule, and the default query."""
    schedules = [
        {
            "name": spec.name,
            "rule": spec.rule,
            "comparable": spec.placement != "bidirectional",
        }
        for spec in schedule_specs()
    ]
    return {"schedules": schedules, "usual": asdict(SimulationQuery())}


def stage_costs(query: SimulationQuery, placement: Placement) -> list[StageCost]:
    """Return the cost of each stage, copies included."""
    per_rank = StageCost(query.forward, query.backward_input, query.backward_weight)
    stage = divide_cost(per_rank, placement.depth // placement.ranks)
    fields = ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")
    last = replace(stage, **{name: getattr(stage, name) + query.head * getattr(per_rank, name) for name in fields})
    return [*[stage] * (placement.depth - 1), last] * placement.pipelines


@lru_cache(maxsize=64)
def simulate_named(query: SimulationQuery, name: str) -> SimulationSummary:
    """Simulate one of a query's schedules. Raise ArgumentError if it is not one, or its definition does not allow
    it."""
    match = next((spec for spec in query.entries() if spec.name == name), None)
    if match is None:
        raise ArgumentError(f"schedule={name[:40]!r} is not in the query: {', '.join(query.schedules)}")
    return _summarize(query, _generate(name, query.numbers(match)))


@lru_cache(maxsize=64)
def _generate(name: str, params: ScheduleParams) -> Schedule:
    """Cache what stays the same while only costs change."""
    return generate(name, params.ranks, params.microbatches, params.stages_per_rank)


def _summarize(query: SimulationQuery, schedule: Schedule) -> SimulationSummary:
    costs = stage_costs(query, schedule.placement)
    return SimulationSummary.of(schedule, costs, LinkCost(query.comm))


def simulate(query: SimulationQuery) -> dict[str, Any]:
    """Simulate every schedule of a query on one time axis: `penstock simulate`'s metrics, and what a timeline shows."""
    summaries, not_allowed = [], []
    for spec in query.entries():
        if reason := spec.refusal(query.numbers(spec)):
            not_allowed.append({"name": spec.name, "reason": reason})
        else:
            summaries.append(simulate_named(query, spec.name))
    return {
        "schedules": [_describe(query, summary) for summary in summaries],
        "not_allowed": not_allowed,
        "timeline": timeline_data([_band(query, summary) for summary in summaries], unit="units"),
    }


def _describe(query: SimulationQuery, summary: SimulationSummary) -> dict[str, Any]:
    return summary.to_dict() | {"fits": fits(query, summary)}


def fits(query: SimulationQuery, summary: SimulationSummary) -> bool:
    """Whether every rank keeps to the memory limit."""
    limit = math.inf if query.memory_limit is None else query.memory_limit
    return max(summary.peak_activations) <= limit * (1 + 1e-9)


def _band(query: SimulationQuery, summary: SimulationSummary) -> dict[str, Any]:
    schedule, timeline = summary.schedule, summary.timeline
    placement = schedule.placement
    costs = fill_activation_sizes(placement, summary.by_stage)
    units = memory_units(placement, costs)
    curves = []
    for rank_memory, unit in zip(memory(schedule, costs, timeline), units, strict=True):
        rank_curve = curve(rank_memory, query.memory_limit, unit="", label="activations")
        curves.append(rank_curve | {"bytes": rank_curve["bytes"] / unit})  # 1: a microbatch on all of a rank's stages
    note = f"span {timeline.span_seconds:.4g}, bubble {timeline.bubble_rate:.1%}"
    order = _order(schedule)
    return band(schedule.name, timeline, schedule, path=summary.path, memory=curves, note=note, order=order)


@lru_cache(maxsize=64)
def _order(schedule: Schedule) -> Order:
    """Cache what stays the same while only costs change."""
    return Order.of(schedule.rows, schedule).encode()


# -- search -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def search_cached(query: SimulationQuery, shape: str, seconds: float) -> tuple[SearchResult, SimulationSummary]:
    """Search for the best schedule for a query's costs within its memory limit. Raise ArgumentError if there is too
    much to search, the limit leaves no room, or stages are neither in a loop nor on a V."""
    if shape not in ("loop", "v"):
        raise ArgumentError(f"placement={shape[:20]!r}: expected loop or v")
    if not 0 < seconds <= MAX_SECONDS:
        raise ArgumentError(f"seconds={seconds:g}: the studio searches up to {MAX_SECONDS:g} s; `penstock search` more")
    chunks = 2 if shape == "v" else query.chunks or 1
    actions = 3 * query.ranks * query.microbatches * chunks
    if actions > MAX_TO_SEARCH:
        raise ArgumentError(
            f"{query.size}: a schedule has {actions:,} actions, and the studio searches up to {MAX_TO_SEARCH:,}; "
            f"take fewer, or use `penstock search`"
        )
    placement = place(shape, query.ranks, chunks)
    costs = Costs(tuple(stage_costs(query, placement)), LinkCost(query.comm))
    result = search_with(costs, placement, query.microbatches, query.memory_limit, objective="span", seconds=seconds)
    schedule = result.schedule
    return result, _summarize(query, Schedule(SEARCHED, schedule.placement, schedule.microbatches, schedule.rows))


def search_for(query: SimulationQuery, shape: str, seconds: float) -> dict[str, Any]:
    """Return the result of a search, its metrics, its timeline, and how far it may be from the best."""
    result, summary = search_cached(query, shape, seconds)
    return {
        "schedules": [_describe(query, summary)],
        "timeline": timeline_data([_band(query, summary)], unit="units"),
        "lower_bound": result.lower_bound_seconds,
        "gap": result.gap,
        "is_named": result.schedule.name if result.schedule.name != SEARCHED else None,
    }


# -- walk-through -----------------------------------------------------------------------------------------------------


def walk(query: SimulationQuery) -> dict[str, Any]:
    """Describe the slots of a query's schedules in words. Raise ArgumentError if there are too many slots and ranks to
    read."""
    walks, cells = [], 0
    for spec in query.entries():
        if reason := spec.refusal(query.numbers(spec)):
            raise ArgumentError(f"{spec.name} {reason}")
        steps = walkthrough(simulate_named(query, spec.name).schedule)
        cells += steps.slots * query.ranks
        if cells > MAX_CELLS:
            raise ArgumentError(
                f"{spec.name} with {query.size} has {steps.slots} slots, too many to go through; "
                f"take fewer microbatches (up to {MAX_CELLS:,} cells are shown)"
            )
        ranks: list[list[dict[str, Any]]] = []
        for moments in steps.ranks:
            ranks.append([{"text": m.text, "needs": [[s.rank, s.slot] for s in m.needs]} for m in moments])
            for cell, action in zip(ranks[-1], (moment.action for moment in moments), strict=True):
                if action is not None:
                    cell |= {"op": action.op.value, "label": f"{action.op.value}{action.microbatch or 0}"}
        longest = max(len(str(action.microbatch or 0)) for action in steps.schedule.rows[0])
        walks.append(
            {
                "name": spec.name,
                "rule": spec.rule,
                "longest": 1 + longest,
                "slots": steps.slots,
                "headlines": [steps.headline(slot) for slot in range(steps.slots)],
                "ranks": ranks,
            }
        )
    return {"walks": walks}


# -- files ------------------------------------------------------------------------------------------------------------

_FILES: Mapping[str, tuple[str, str, Callable[[SimulationSummary], str]]] = {
    "csv": ("csv", "text/csv", lambda summary: to_csv(summary.schedule)),
    "svg": ("svg", "image/svg+xml", lambda summary: svg([make_panel(summary.schedule, summary.timeline)], "units")),
    "perfetto": ("perfetto.json", "application/json", lambda summary: json.dumps(to_perfetto(summary.timeline))),
}
"""The suffix of a file, its type and its content, by kind. The page converts the SVG to PNG."""


def export(summary: SimulationSummary, kind: str) -> tuple[str, str, str]:
    """Export a simulated schedule as a file of this kind: return its name, its type, and its content.

    Raises:
        ArgumentError: there is no such kind.
        ScheduleError: a CSV cannot express the schedule.
    """
    if kind not in _FILES:
        raise ArgumentError(f"export {kind[:20]!r}: expected {', '.join(_FILES)}")
    ending, media_type, write = _FILES[kind]
    schedule = summary.schedule
    return f"{schedule.name}-p{schedule.ranks}-m{schedule.microbatches}.{ending}", media_type, write(summary)

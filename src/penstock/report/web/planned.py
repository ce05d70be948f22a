"""A plan -> the contents of a report: a prediction only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from penstock._base.formatting import duration, format_bytes, pluralize
from penstock.plan import Plan
from penstock.plan.explain import Prediction
from penstock.plan.predict import schedule_for_plan
from penstock.report.web.contents import Contents, Metric, PeakMemory, Section
from penstock.report.web.idle_table import predicted_idle
from penstock.report.web.timeline_data import band, curve
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, memory
from penstock.simulate.figures import title

_NOTE = (
    "A plan keeps what each stage takes, not its parts: the timeline divides that evenly into F, I and W, and has no "
    "messages. The figures are the plan's own."
)


_CURVE = (
    " The curves lead from what it holds all the time to that, as it holds more and fewer microbatches, taken to be "
    "alike."
)


def from_plan(plan: Plan, name: str) -> Contents:
    """Build the report of a plan.

    Args:
        name: of its file.
    """
    choice, schedule = plan.choice, schedule_for_plan(plan)
    timeline = Prediction(plan.stage_seconds).timeline(schedule)
    curves = _memory(plan, schedule, timeline)
    limits = [None if math.isinf(limit) else limit for limit in plan.limit_bytes]
    peaks = tuple(
        PeakMemory(rank, peak, limit, "predicted")
        for rank, (peak, limit) in enumerate(zip(plan.memory_bytes, limits, strict=True))
    )
    fullest, limit = peaks[plan.fullest], limits[plan.fullest]
    limit_text = f"of {format_bytes(limit)}" if limit is not None else "no limit"
    idle = predicted_idle(plan) if plan.idle else None
    facts = [("microbatches", f"{choice.microbatches} of {pluralize(choice.rows, 'row')}, on each replica")]
    if plan.cuts:
        facts.append(("stages begin with", ", ".join(("the input", *plan.cuts))))
    for label, stages in (("recomputed", plan.recompute), ("offloaded", plan.offload)):
        if stages:
            facts.append((f"{label} stages", ", ".join(map(str, stages))))
    worst = max(plan.idle, key=plan.idle.__getitem__, default="")
    return Contents(
        title=title(schedule),
        headings=(name, "plan (prediction only)", pluralize(choice.replicas, "replica")),
        metrics=(
            Metric("a step takes", duration(plan.step_seconds), "predicted"),
            Metric("speed", f"{plan.rows_per_second:,.4g} samples/s", f"{pluralize(choice.devices, 'device')}"),
            Metric("idle", f"{plan.bubble:.1%}", f"of all ranks' time; most: {worst}" if plan.bubble else ""),
            Metric("memory", format_bytes(fullest.peak), f"{limit_text}, rank {fullest.rank}, the fullest"),
        ),
        warnings=(_NOTE,),
        bands=(band("predicted", timeline, schedule, memory=curves, note="roughly, without messages"),),
        idle=idle,
        memory=peaks,
        memory_note=f"Predicted: the most that a rank needs at once.{_CURVE if curves else ''}",
        sections=(Section("What is planned", facts=facts),),
        numbers=plan.to_dict(),
        plan=plan,
    )


def _memory(plan: Plan, schedule: Schedule, timeline: Timeline) -> list[dict[str, Any] | None] | None:
    """Return each rank's memory over time, from its static memory to the plan's peak, in step with the microbatches
    that it holds: a plan does not record how large each is. None if it does not record the static memory either."""
    if len(plan.held_bytes) != schedule.ranks:
        return None
    unit_cost = StageCost(1.0, 1.0, 1.0, activation_bytes=1.0, weight_gradient_bytes=1.0)
    curves = []
    for rank, unit_memory in enumerate(memory(schedule, unit_cost, timeline)):
        constant, max_held = plan.held_bytes[rank], max(unit_memory.activations, default=0.0)
        bytes_each = max(0.0, plan.memory_bytes[rank] - constant) / max_held if max_held else 0.0
        scaled = tuple(bytes_each * number for number in unit_memory.activations)
        limit = plan.limit_bytes[rank]
        curves.append(curve(replace(unit_memory, parameters=constant, activations=scaled), limit, label="predicted"))
    return [*curves]

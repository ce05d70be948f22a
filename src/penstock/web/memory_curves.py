"""Memory under the ranks of a timeline of which it was not measured: by a plan, or by a profile of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.plan import Plan
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import Memory, StageCost, memory
from penstock.web.page_data import curve

_LABEL = "predicted"


def by_stages(costs: Sequence[StageCost], schedule: Schedule, timeline: Timeline) -> list[Memory]:
    """What each rank holds while a timeline runs."""
    return memory(schedule, [*costs] * schedule.placement.pipelines, timeline)


def drawn(held: Sequence[Memory]) -> list[dict[str, Any] | None]:
    """The curves, for `band`."""
    return [curve(one, label=_LABEL) for one in held]


def of_plan(plan: Plan, schedule: Schedule, timeline: Timeline) -> list[dict[str, Any] | None] | None:
    """From what a rank holds all the time to the plan's peak, in step with the microbatches that it holds, of which a
    plan does not say how much each is. None: it does not say what is held all the time either."""
    if len(plan.held_bytes) != schedule.ranks:
        return None
    alike = StageCost(1.0, 1.0, 1.0, activation_bytes=1.0, weight_gradient_bytes=1.0)
    made = []
    for rank, held in enumerate(by_stages([alike] * schedule.placement.depth, schedule, timeline)):
        constant, most = plan.held_bytes[rank], max(held.activations, default=0.0)
        each = max(0.0, plan.memory_bytes[rank] - constant) / most if most else 0.0
        scaled = tuple(each * number for number in held.activations)
        limit = plan.limit_bytes[rank]
        made.append(curve(replace(held, parameters=constant, activations=scaled), limit, label=_LABEL))
    return [*made]

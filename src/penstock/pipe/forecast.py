"""What is known of a run before its first step: how long one should take, and what each rank should hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.partition.measure.footprint import footprint
from penstock.partition.values.memory import meta_bytes
from penstock.pipe.session import Session
from penstock.plan import Plan
from penstock.runs.reading import Predicted
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, memory, simulate
from penstock.stages import MODEL_INPUT


def predicted(session: Session, plan: Plan | None) -> Predicted | None:
    """How long a step should take by the plan that is followed, or by the profile that decided where to cut; None if
    neither did.

    A plan says what a stage takes in all; then the three parts are taken as equally long.
    """
    order, partition = session.order, session.partition
    costs: Sequence[StageCost] = getattr(partition, "costs", ())  # another front end may have none
    link: LinkCost | None = getattr(partition, "link", None)
    if plan is not None:
        costs, link = [StageCost(one / 3, one / 3, one / 3) for one in plan.stage_seconds], None
    if len(costs) != order.placement.depth:
        return None
    timeline = simulate(order, [*costs] * order.placement.pipelines, link or LinkCost(0.0))
    seconds = tuple(one.forward_seconds + one.backward_seconds for one in costs)
    if plan is not None:
        return Predicted("the plan", plan.step_seconds, seconds, timeline)
    source = "the times measured to cut the model" if session.options.choice.profile is None else "the profile"
    return Predicted(source, timeline.makespan_seconds, seconds, timeline)


def activation_bytes(session: Session) -> tuple[int, ...]:
    """For each stage, what one microbatch keeps there from forward to backward, as forwards on fake tensors say; empty
    if a stage does not run on these, or if activations are recomputed or offloaded.
    """
    options, partition = session.options, session.partition
    if options.recompute != "never" or options.offload:
        return ()
    found = [footprint(stage.module, [each.meta for each in stage.meta.inputs]) for stage in partition.stages]
    kept = []
    for stage, each in zip(partition.stages, found, strict=True):
        if each is None:
            return ()
        given = sum(meta_bytes(one.meta) for one in stage.meta.inputs if one.source == MODEL_INPUT)
        kept.append(max(0, each.kept - given))  # the batch is there all the time
    return tuple(kept)


def memory_after_actions(schedule: Schedule, kept: Sequence[int], held: Sequence[int]) -> list[list[int]]:
    """What each rank holds after each of its actions, as `simulate.memory` counts it.

    Args:
        schedule: as it runs, communication included.
        kept: for each stage, what a microbatch keeps from forward to backward.
        held: for each stage, what it holds all the time.
    """
    costs = [
        StageCost(1, 1, 1, activation_bytes=one, weight_gradient_bytes=one, parameter_bytes=always)
        for one, always in zip(kept, held, strict=True)
    ] * schedule.placement.pipelines
    # The order alone counts, so let the nth action last from 2n to 2n + 1.
    times = [[(2 * n * 10**9, 2 * n * 10**9, (2 * n + 1) * 10**9) for n in range(len(row))] for row in schedule.rows]
    timeline = Timeline.of_rows(schedule.rows, times)
    found = []
    for row, one in zip(schedule.rows, memory(schedule, costs, timeline), strict=True):
        course = np.concatenate([[0.0], one.activations]) + one.parameters
        places = np.searchsorted(np.array(one.seconds), 2 * np.arange(len(row)) + 1, side="right")
        found.append([int(size) for size in course[places]])
    return found


def to_file(found: Predicted) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "source": found.source,
        "step_seconds": found.step_seconds,
        "stage_seconds": [*found.stage_seconds],
        "timeline": found.timeline.to_dict(),
    }

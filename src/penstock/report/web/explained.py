"""An explained step -> the contents of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock._base.formatting import duration, pluralize
from penstock.plan.explain import Explanation
from penstock.report.text import TURNS
from penstock.report.web.contents import Contents, Metric, PeakMemory
from penstock.report.web.idle_table import explain_idle
from penstock.report.web.timeline_data import band, curve
from penstock.schedule.timeline import Timeline
from penstock.simulate import Memory, StageCost, memory
from penstock.simulate.figures import title


def from_explanation(explanation: Explanation, name: str, costs: Sequence[StageCost]) -> Contents:
    """Build the report of an explained step.

    Args:
        name: of the file or folder.
        costs: what each stage keeps; empty: unknown.
    """
    step = explanation.step
    slowest = step.slowest
    memories = memory(slowest.schedule, costs, slowest.timeline) if costs else []
    label = f"{explanation.origin}, step {step.number}" if len(explanation.run.steps) > 1 else explanation.origin
    measured_band = band(label, slowest.timeline, slowest.schedule, memory=_curves(memories))
    step_count = [pluralize(len(explanation.run.steps), "step")] if len(explanation.run.steps) > 1 else []
    replicas = [f"{pluralize(len(step.replicas), 'replica')}; the slowest is shown"] if len(step.replicas) > 1 else []
    return Contents(
        title=title(slowest.schedule),
        headings=(name, *step_count, *replicas),
        warnings=explanation.run.notes,
        metrics=tuple(step_metrics(explanation)),
        bands=(measured_band, *comparison_bands(explanation, costs)),
        idle=explain_idle(explanation),
        improvements=explanation.advice,
        no_suggestion_reason=explanation.nothing,
        memory=tuple(PeakMemory(rank, m.peak, None, "predicted") for rank, m in enumerate(memories)),
        memory_note="Predicted from the activations that the profile records." if memories else "",
        numbers=explanation.to_dict(),
        explanation=explanation,
    )


def comparison_bands(explanation: Explanation, costs: Sequence[StageCost] = ()) -> list[dict[str, Any]]:
    """Return the timelines beside the measured one: what-ifs, the prediction, or else the same order with everything
    alike."""
    schedule = explanation.step.slowest.schedule
    if explanation.what_ifs:
        index = explanation.step.replicas.index(explanation.step.slowest)
        return [
            band(
                f"what if {change.text}",
                case.timeline(case.schedules[index], case.seconds[index]),
                case.schedules[index],
                note=f"simulated; the step {change.claim}",
            )
            for change in explanation.what_ifs
            for case in change.cases[:1]
        ]
    if explanation.predicted is not None:
        memories = memory(schedule, costs, explanation.predicted) if costs else []
        note = "from the stage times of the plan or profile"
        if explanation.predicted_seconds != explanation.predicted.makespan_seconds:
            note += "; roughly, without messages"
        return [band("predicted", explanation.predicted, schedule, memory=_curves(memories), note=note)]
    return [band("if perfectly balanced", explanation.even, schedule, note="stages, ranks and microbatches alike")]


def _curves(memories: Sequence[Memory]) -> list[dict[str, Any] | None] | None:
    return [curve(m, label="predicted") for m in memories] or None


def step_metrics(explanation: Explanation) -> list[Metric]:
    """Return the summary of a step."""
    step = explanation.step
    detail = f"step {step.number}, the median of {len(explanation.run.steps)}" if len(explanation.run.steps) > 1 else ""
    outside = step.seconds - step.pipeline_seconds
    if outside > 0.001 * step.seconds:
        detail = "; ".join(filter(None, [detail, f"{duration(outside)} outside the pipeline"]))
    return [
        Metric("a step takes", duration(step.seconds), detail),
        *idle_metrics(explanation),
        *prediction_metrics(explanation),
    ]


def idle_metrics(explanation: Explanation) -> list[Metric]:
    """Return the idle share, and the time if perfectly balanced."""
    idle, pipeline = explain_idle(explanation), duration(explanation.step.pipeline_seconds)
    return [
        Metric("idle", f"{idle.share:.1%}", f"of all ranks' time; most: {idle.worst}" if idle.worst else ""),
        Metric("if perfectly balanced", duration(explanation.where.even_seconds), f"of the pipeline's {pipeline}"),
    ]


def prediction_metrics(explanation: Explanation) -> list[Metric]:
    """Return the explanation's prediction, if it has one."""
    seconds = explanation.predicted_seconds
    return [] if seconds is None else [vs_prediction("pipeline, predicted", seconds, explanation.step.pipeline_seconds)]


def vs_prediction(name: str, predicted: float, measured: float) -> Metric:
    """Show a prediction beside the measurement."""
    difference = f"; {predicted / measured - 1:+.1%}" if measured else ""
    return Metric(name, duration(predicted), f"measured {duration(measured)}{difference}")


def from_serialized(timelines: Sequence[Timeline], name: str) -> Contents:
    """Build the page of ranks that took turns in one process: durations are real, starts not comparable."""
    timeline = timelines[-1]
    busy = [timeline.busy_seconds(rank) for rank in range(timeline.ranks)]
    return Contents(
        title=name,
        headings=(pluralize(timeline.ranks, "rank"), "in one process"),
        warnings=(TURNS_NOTE,),
        metrics=(
            Metric("a step takes", duration(timeline.makespan_seconds), "all ranks, one after another"),
            Metric("the longest rank computes", duration(max(busy, default=0.0)), "the least that a step can take"),
        ),
        bands=(band("measured, in turns", timeline, note="starts cannot be compared"),),
        numbers={"makespan": timeline.makespan_seconds, "busy": busy},
    )


TURNS_NOTE = f"One process ran all ranks in turn. Durations are valid; start times and bubbles are not: {TURNS}."
"""The warning for ranks that took turns."""

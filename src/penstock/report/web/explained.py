"""A measured step, explained -> what a report shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock._base.words import counted
from penstock.plan.explain import Explanation
from penstock.report.text import TURNS
from penstock.report.web.contents import Contents, Figure, Held, duration
from penstock.report.web.idle import idle_of
from penstock.report.web.timeline_data import band, curve
from penstock.schedule.timeline import Timeline
from penstock.simulate import Memory, StageCost, memory
from penstock.simulate.figures import title


def of_explanation(found: Explanation, name: str, costs: Sequence[StageCost] = ()) -> Contents:
    """Build the report of an explained step.

    Args:
        name: of the file or folder.
        costs: what each stage keeps; empty: nobody knows.
    """
    step = found.step
    slowest = step.slowest
    held = memory(slowest.schedule, costs, slowest.timeline) if costs else []
    what = f"{found.origin}, step {step.number}" if len(found.run.steps) > 1 else found.origin
    measured = band(what, slowest.timeline, slowest.schedule, memory=_curves(held))
    several = [counted(len(found.run.steps), "step")] if len(found.run.steps) > 1 else []
    more = [f"{counted(len(step.replicas), 'replica')}; the slowest is shown"] if len(step.replicas) > 1 else []
    return Contents(
        title=title(slowest.schedule),
        headings=(name, *several, *more),
        warnings=found.run.notes,
        figures=tuple(figures_of(found)),
        bands=(measured, *compared(found, costs)),
        idle=idle_of(found),
        improvements=found.advice,
        nothing_better=found.nothing,
        memory=tuple(Held(rank, one.peak, None, "predicted") for rank, one in enumerate(held)),
        memory_note="Predicted by what the profile says that stages keep." if held else "",
        numbers=found.to_dict(),
        explanation=found,
    )


def compared(found: Explanation, costs: Sequence[StageCost] = ()) -> list[dict[str, Any]]:
    """Return the timelines beside the measured one: what-ifs, the prediction, or else the same order with everything
    alike."""
    schedule = found.step.slowest.schedule
    if found.what_ifs:
        place = found.step.replicas.index(found.step.slowest)
        return [
            band(
                f"what if {change.text}",
                case.timeline(case.schedules[place], case.seconds[place]),
                case.schedules[place],
                note=f"simulated; the step {change.claim}",
            )
            for change in found.what_ifs
            for case in change.cases[:1]
        ]
    if found.predicted is not None:
        held = memory(schedule, costs, found.predicted) if costs else []
        rough = "" if found.predicted_seconds == found.predicted.makespan_seconds else "; roughly, without messages"
        return [
            band(
                "predicted",
                found.predicted,
                schedule,
                memory=_curves(held),
                note=f"by what the plan or profile said of each stage{rough}",
            )
        ]
    return [band("if perfectly balanced", found.even, schedule, note="stages, ranks and microbatches alike")]


def _curves(held: Sequence[Memory]) -> list[dict[str, Any] | None] | None:
    return [curve(one, label="predicted") for one in held] or None


def figures_of(found: Explanation) -> list[Figure]:
    """Return the summary of a step."""
    step = found.step
    several = f"step {step.number}, the median of {len(found.run.steps)}" if len(found.run.steps) > 1 else ""
    outside = step.seconds - step.pipeline_seconds
    if outside > 0.001 * step.seconds:
        several = "; ".join(filter(None, [several, f"{duration(outside)} outside the pipeline"]))
    return [Figure("a step takes", duration(step.seconds), several), *reasons(found), *predicted_of(found)]


def reasons(found: Explanation) -> list[Figure]:
    """Why a step takes as long as it does."""
    idle, pipeline = idle_of(found), duration(found.step.pipeline_seconds)
    return [
        Figure("idle", f"{idle.share:.1%}", f"of all ranks' time; most: {idle.worst}" if idle.worst else ""),
        Figure("if perfectly balanced", duration(found.where.even_seconds), f"of the pipeline's {pipeline}"),
    ]


def predicted_of(found: Explanation) -> list[Figure]:
    """Return the explanation's prediction, if it has one."""
    seconds = found.predicted_seconds
    return [] if seconds is None else [against("pipeline, predicted", seconds, found.step.pipeline_seconds)]


def against(name: str, predicted: float, measured: float) -> Figure:
    """Show a prediction beside the measurement."""
    wrong = f"; {predicted / measured - 1:+.1%}" if measured else ""
    return Figure(name, duration(predicted), f"measured {duration(measured)}{wrong}")


def in_turns(timelines: Sequence[Timeline], name: str) -> Contents:
    """Timelines of ranks that took turns in one process: their durations are real, their starts cannot be compared."""
    timeline = timelines[-1]
    busy = [timeline.busy_seconds(rank) for rank in range(timeline.ranks)]
    return Contents(
        title=name,
        headings=(counted(timeline.ranks, "rank"), "in one process"),
        warnings=(TURNS_NOTE,),
        figures=(
            Figure("a step takes", duration(timeline.makespan_seconds), "all ranks, one after another"),
            Figure("the longest rank computes", duration(max(busy, default=0.0)), "the least that a step can take"),
        ),
        bands=(band("measured, in turns", timeline, note="starts cannot be compared"),),
        numbers={"makespan": timeline.makespan_seconds, "busy": busy},
    )


TURNS_NOTE = f"One process ran all ranks in turn. Durations are valid; start times and bubbles are not: {TURNS}."
"""What is said of ranks that took turns."""

"""The folder of a training run -> what a report shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from penstock._base.errors import ArgumentError, ScheduleError
from penstock._base.words import counted, sized
from penstock.plan.explain import Explanation
from penstock.report.web.contents import Contents, Course, Figure, Held, date_text, duration
from penstock.report.web.explained import TURNS_NOTE, against, compared, predicted_of, reasons
from penstock.report.web.idle import idle_of
from penstock.report.web.timeline_data import band
from penstock.schedule import Schedule
from penstock.simulate.computations import Columns
from penstock.trace.runs import RecordedPrediction, RecordedRun, StepRecord
from penstock.trace.runs.progress import RECENT, Progress
from penstock.trace.runs.summary import failure_messages, health

_MEMORY_NOTES = {
    "measured": "Measured: what the rank's device had allocated after each action.",
    "predicted": "Predicted by the schedule and the stages' bytes: parameters, gradients, an optimizer's state of two "
    "values for each trained one (Adam), and activations, without what an action needs while it runs.",
}


def of_run(
    run: RecordedRun,
    found: Explanation | None,
    step: int | None,
    doubts: Sequence[str] = (),
    *,
    other_prediction: bool = False,
) -> Contents:
    """Build the report of a recorded run.

    Args:
        run: the folder.
        found: the explanation of one of its steps; None: nothing can be explained of ranks that took turns, nor of a
            run without timelines.
        step: the step whose timeline is shown; None: no timeline was recorded.
        doubts: why nothing is explained, if that is not plain.
        other_prediction: whether the explanation's prediction is to be shown rather than the run's own.
    """
    about, steps = run.about, run.steps()
    predicted = None if other_prediction and found is not None else run.predicted()
    bands: list[dict[str, Any]] = []
    memory: list[Held] = []
    states, damaged = run.ranks_and_damage()
    warnings = [*doubts, *(found.run.notes if found else ()), *damaged]
    if step is None and not doubts:
        warnings.append("No timeline was recorded: the first is recorded at step 5; trace_every=0 disables them.")
    if step is not None:
        timeline = run.timeline(step)
        if timeline.serialized:
            warnings.append(TURNS_NOTE)
        curves, memory = _memory(run, step)
        note = "starts cannot be compared" if timeline.serialized else ""
        bands.append(band(f"measured, step {step}", timeline, _whole(run, step), memory=curves, note=note))
    if predicted is not None and not (found and found.what_ifs):
        bands.append(band("predicted", predicted.timeline, _fitting(run, step), note=f"by {predicted.source}"))
    elif found is not None:
        bands += compared(found)
    replicas = [counted(about.replicas, "replica")] if about.replicas > 1 else []
    counts = counted(about.ranks, "rank"), counted(about.microbatches, "microbatch"), *replicas
    started = f"started {date_text(about.started)}"
    headings = about.model, about.schedule, *counts, counted(len(steps), "step"), started
    numbers = {"explained": found.to_dict() if found else None, "steps": len(steps)}
    return Contents(
        title=about.name,
        headings=headings,
        troubles=tuple(failure_messages([(state, health(state)) for state in states])),
        warnings=tuple(warnings),
        figures=(*_figures(steps, memory), *_of_prediction(predicted, found, steps)),
        bands=tuple(bands),
        idle=idle_of(found) if found else None,
        improvements=found.advice if found else (),
        nothing_better=found.nothing if found else "",
        memory=tuple(memory),
        memory_note=" ".join(_MEMORY_NOTES[source] for source in dict.fromkeys(one.source for one in memory)),
        courses=(*_courses(steps), *_peaks(run)),
        facts=tuple(_facts(run)),
        numbers=numbers,
        explanation=found,
    )


def _figures(steps: Sequence[StepRecord], memory: Sequence[Held]) -> list[Figure]:
    figures = []
    known = Progress.of(steps)
    if known is not None and known.seconds and known.rows_per_second:
        recent = f"median of the last {min(RECENT, len(steps) - 1)}"
        of = f"from one step's end to the next, {recent}; {known.rows_per_second:,.4g} rows/s"
        figures.append(Figure("step time", duration(known.seconds), of))
    if later := steps[1:][-RECENT:] or steps:  # the first step sets things up
        inside = median(one.seconds for one in later)
        figures.append(Figure("in Pipeline.step", duration(inside), "of it, without the optimizer and the data"))
    losses = [one for one in steps if one.loss is not None]
    if losses:
        figures.append(Figure("loss", f"{losses[-1].loss:.5g}", f"step {losses[-1].step}; first {losses[0].loss:.5g}"))
    if memory:
        fullest = max(memory, key=lambda one: one.peak / (one.limit or math.inf) or one.peak)
        of = "" if fullest.limit is None else f"of {sized(fullest.limit)}, "
        figures.append(Figure("memory", sized(fullest.peak), f"{of}rank {fullest.rank}, {fullest.source}"))
    return figures


def _of_prediction(
    predicted: RecordedPrediction | None, found: Explanation | None, steps: Sequence[StepRecord]
) -> list[Figure]:
    """Why ranks are idle, and the prediction, which is of a step without the optimizer."""
    figures = []
    if found:
        of_step = reasons(found) + ([] if predicted else predicted_of(found))
        figures = [one._replace(of=f"{one.of}; step {found.step.number}") for one in of_step]
    if predicted is not None and steps:
        measured = found.step.pipeline_seconds if found else median(one.seconds for one in steps[1:] or steps)
        figures.append(against("a step, predicted", predicted.step_seconds, measured))
    return figures


def _memory(run: RecordedRun, step: int) -> tuple[list[dict[str, Any] | None], list[Held]]:
    """Return each rank's memory over a step as curves, and the peaks."""
    timeline, limit = run.timeline(step), run.about.memory_limit
    curves: list[dict[str, Any] | None] = [None] * timeline.ranks
    held = []
    for one in run.memory(step):
        source = "measured" if one.measured else "predicted"
        moments = np.array(timeline.tracks[one.rank].end)
        sizes = np.array(one.bytes, np.float64)
        curves[one.rank] = {"t": moments, "bytes": sizes, "limit": limit, "unit": "bytes", "label": source}
        held.append(Held(one.rank, float(sizes.max(initial=0.0)), limit, source))
    return curves, held


def _whole(run: RecordedRun, step: int) -> Schedule | None:
    """Return the schedule of a step; None if actions are missing from it, so that it is unknown who waited for whom."""
    try:
        schedule = run.schedule(step)
        Columns.from_schedule(schedule)
    except (ArgumentError, ScheduleError):
        return None
    return schedule


def _fitting(run: RecordedRun, step: int | None) -> Schedule | None:
    """Return the schedule of the predicted timeline, if it is that of a step."""
    predicted = run.predicted()
    if step is None or predicted is None:
        return None
    try:
        return run.schedule(step).with_rows(track.actions for track in predicted.timeline.tracks)
    except ArgumentError:
        return None


def _courses(steps: Sequence[StepRecord]) -> list[Course]:
    """Return the loss, and the step times."""
    numbers = [one.step for one in steps]
    losses = [one.loss if one.loss is not None and math.isfinite(one.loss) else None for one in steps]
    found = [Course("loss", numbers, losses)] if any(one is not None for one in losses) else []
    if len(steps) > 1:
        found.append(Course("seconds in Pipeline.step", numbers, [one.seconds for one in steps], "s"))
    return found


def _peaks(run: RecordedRun) -> list[Course]:
    """Return each device's peak allocation in every measured step, if there are several."""
    every = {
        step: [max(one.bytes, default=0) for one in run.memory(step) if one.measured] for step in run.timelines()[0]
    }
    found = {step: max(peaks) for step, peaks in every.items() if peaks}
    if len(found) < 2:
        return []
    size, unit = next((one for one in _SIZES if max(found.values()) >= one[0]), (1.0, "B"))
    return [Course("peak memory", [*found], [peak / size for peak in found.values()], unit)]


_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    about = run.about
    found = [
        ("model", about.model),
        ("device", f"{about.device}, {about.processes:,} process{'es' if about.processes > 1 else ''}"),
        (
            "schedule",
            f"{about.schedule}, {counted(about.microbatches, 'microbatch')} of a batch of {about.rows:,} rows",
        ),
        ("stages on ranks", about.placement),
        ("versions", f"penstock {about.penstock}, torch {about.torch}"),
        ("host", about.host),
        ("compared with one device", "verified" if about.verified else "unverified"),
    ]
    if about.resumed:
        found.append(("resumed", "; ".join(map(date_text, about.resumed))))
    for stage, units in enumerate(about.units):  # of many modules the first and the last
        many = len(units) > 3
        said = f"{units[0]} to {units[-1]}, {counted(len(units), 'module')}" if many else ", ".join(units)
        found.append((f"stage {stage}", said))
    return found

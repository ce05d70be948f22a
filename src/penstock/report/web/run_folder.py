"""The folder of a training run -> the contents of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from penstock._base.errors import ArgumentError, ScheduleError
from penstock._base.formatting import duration, format_bytes, pluralize
from penstock.plan.explain import Explanation
from penstock.report.web.contents import Contents, Metric, PeakMemory, Section, Series, date_text
from penstock.report.web.explained import TURNS_NOTE, comparison_bands, idle_metrics, prediction_metrics, vs_prediction
from penstock.report.web.idle_table import explain_idle
from penstock.report.web.timeline_data import band
from penstock.schedule import Schedule
from penstock.simulate.computations import Columns
from penstock.trace.runs import RecordedPrediction, RecordedRun, StepRecord
from penstock.trace.runs.progress import RECENT, Progress
from penstock.trace.runs.summary import RunSnapshot, failure_messages

_MEMORY_NOTES = {
    "measured": "Measured: what the rank's device had allocated after each action.",
    "predicted": "Predicted by the schedule and the stages' bytes: parameters, gradients, an optimizer's state of two "
    "values for each trained one (Adam), and activations, without what an action needs while it runs.",
}


def from_run(
    run: RecordedRun,
    explanation: Explanation | None,
    step: int | None,
    errors: Sequence[str] = (),
    *,
    other_prediction: bool = False,
) -> Contents:
    """Build the report of a recorded run.

    Args:
        run: the folder.
        explanation: of one of its steps; None: there is none for ranks that took turns, nor for a run without
            timelines.
        step: the step whose timeline is shown; None: no timeline was recorded.
        errors: why nothing is explained, if that is not obvious.
        other_prediction: whether the explanation's prediction is shown rather than the run's own.
    """
    snapshot, about = RunSnapshot.of(run, most_bytes=None), run.about
    steps = snapshot.steps
    predicted = None if other_prediction and explanation is not None else run.predicted()
    bands: list[dict[str, Any]] = []
    memory: list[PeakMemory] = []
    warnings = [*errors, *(explanation.run.notes if explanation else ()), *snapshot.damaged]
    if step is None and not errors:
        warnings.append("No timeline was recorded: the first is recorded at step 5; trace_every=0 disables them.")
    if step is not None:
        timeline = run.timeline(step)
        if timeline.serialized:
            warnings.append(TURNS_NOTE)
        curves, memory = _memory(run, step)
        note = "starts cannot be compared" if timeline.serialized else ""
        bands.append(band(f"measured, step {step}", timeline, _complete_schedule(run, step), memory=curves, note=note))
    if predicted is not None and not (explanation and explanation.what_ifs):
        bands.append(band("predicted", predicted.timeline, _predicted_order(run, step), note=f"by {predicted.source}"))
    elif explanation is not None:
        bands += comparison_bands(explanation)
    replicas = [pluralize(about.replicas, "replica")] if about.replicas > 1 else []
    counts = pluralize(about.ranks, "rank"), pluralize(about.microbatches, "microbatch"), *replicas
    started = f"started {date_text(about.started)}"
    headings = about.model, about.schedule, *counts, pluralize(len(steps), "step"), started
    numbers = {"explained": explanation.to_dict() if explanation else None, "steps": len(steps)}
    return Contents(
        title=about.name,
        headings=headings,
        failures=tuple(failure_messages(snapshot.ranks)),
        warnings=tuple(warnings),
        metrics=(*_metrics(steps, snapshot.progress, memory), *_explained_metrics(predicted, explanation, steps)),
        bands=tuple(bands),
        idle=explain_idle(explanation) if explanation else None,
        improvements=explanation.advice if explanation else (),
        no_suggestion_reason=explanation.nothing if explanation else "",
        memory=tuple(memory),
        memory_note=" ".join(_MEMORY_NOTES[source] for source in dict.fromkeys(peak.source for peak in memory)),
        series=(*_training_series(steps), *_peak_series(run)),
        sections=(Section("What was run", facts=_facts(run)),),
        numbers=numbers,
        explanation=explanation,
    )


def _metrics(steps: Sequence[StepRecord], progress: Progress | None, memory: Sequence[PeakMemory]) -> list[Metric]:
    metrics = []
    if progress is not None and progress.seconds and progress.rows_per_second:
        recent = f"median of the last {min(RECENT, len(steps) - 1)}"
        detail = f"from one step's end to the next, {recent}; {progress.rows_per_second:,.4g} samples/s"
        metrics.append(Metric("step time", duration(progress.seconds), detail))
    if steady := steps[1:][-RECENT:] or steps:  # the first step sets things up
        inside = median(record.seconds for record in steady)
        metrics.append(Metric("in Pipeline.step", duration(inside), "of it, without the optimizer and the data"))
    losses = [record for record in steps if record.loss is not None]
    if losses:
        metrics.append(Metric("loss", f"{losses[-1].loss:.5g}", f"step {losses[-1].step}; first {losses[0].loss:.5g}"))
    if memory:
        fullest = max(memory, key=lambda peak: peak.peak / (peak.limit or math.inf) or peak.peak)
        detail = "" if fullest.limit is None else f"of {format_bytes(fullest.limit)}, "
        metrics.append(Metric("memory", format_bytes(fullest.peak), f"{detail}rank {fullest.rank}, {fullest.source}"))
    return metrics


def _explained_metrics(
    predicted: RecordedPrediction | None, explanation: Explanation | None, steps: Sequence[StepRecord]
) -> list[Metric]:
    """Why ranks are idle, and the prediction, which is of a step without the optimizer."""
    metrics = []
    if explanation:
        explained = idle_metrics(explanation) + ([] if predicted else prediction_metrics(explanation))
        metrics = [metric._replace(detail=f"{metric.detail}; step {explanation.step.number}") for metric in explained]
    if predicted is not None and steps:
        measured = explanation.step.pipeline_seconds if explanation else median(r.seconds for r in steps[1:] or steps)
        metrics.append(vs_prediction("a step, predicted", predicted.step_seconds, measured))
    return metrics


def _memory(run: RecordedRun, step: int) -> tuple[list[dict[str, Any] | None], list[PeakMemory]]:
    """Return each rank's memory over a step as curves, and the peaks."""
    timeline, limit = run.timeline(step), run.about.memory_limit
    curves: list[dict[str, Any] | None] = [None] * timeline.ranks
    peaks = []
    for trace in run.memory(step):
        source = "measured" if trace.measured else "predicted"
        times = np.array(timeline.tracks[trace.rank].end)
        sizes = np.array(trace.bytes, np.float64)
        curves[trace.rank] = {"t": times, "bytes": sizes, "limit": limit, "unit": "bytes", "label": source}
        peaks.append(PeakMemory(trace.rank, float(sizes.max(initial=0.0)), limit, source))
    return curves, peaks


def _complete_schedule(run: RecordedRun, step: int) -> Schedule | None:
    """Return the schedule of a step; None if actions are missing from it, so that dependencies are unknown."""
    try:
        schedule = run.schedule(step)
        Columns.from_schedule(schedule)
    except (ArgumentError, ScheduleError):
        return None
    return schedule


def _predicted_order(run: RecordedRun, step: int | None) -> Schedule | None:
    """Return the schedule of the predicted timeline, if it is that of a step."""
    predicted = run.predicted()
    if step is None or predicted is None:
        return None
    try:
        return run.schedule(step).with_rows(track.actions for track in predicted.timeline.tracks)
    except ArgumentError:
        return None


def _training_series(steps: Sequence[StepRecord]) -> list[Series]:
    """Return the loss, and the step times."""
    numbers = [record.step for record in steps]
    losses = [record.loss if record.loss is not None and math.isfinite(record.loss) else None for record in steps]
    series = [Series("loss", numbers, losses)] if any(loss is not None for loss in losses) else []
    if len(steps) > 1:
        series.append(Series("seconds in Pipeline.step", numbers, [record.seconds for record in steps], "s"))
    return series


def _peak_series(run: RecordedRun) -> list[Series]:
    """Return each device's peak allocation in every measured step, if there are several."""
    all_peaks = {step: [max(m.bytes, default=0) for m in run.memory(step) if m.measured] for step in run.timelines()[0]}
    peak_by_step = {step: max(peaks) for step, peaks in all_peaks.items() if peaks}
    if len(peak_by_step) < 2:
        return []
    size, unit = next((pair for pair in _SIZES if max(peak_by_step.values()) >= pair[0]), (1.0, "B"))
    return [Series("peak memory", [*peak_by_step], [peak / size for peak in peak_by_step.values()], unit)]


_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    about = run.about
    facts = [
        ("model", about.model),
        ("device", f"{about.device}, {about.processes:,} process{'es' if about.processes > 1 else ''}"),
        (
            "schedule",
            f"{about.schedule}, {pluralize(about.microbatches, 'microbatch')} of a batch of {about.rows:,} rows",
        ),
        ("stages on ranks", about.placement),
        ("versions", f"penstock {about.penstock}, torch {about.torch}"),
        ("host", about.host),
        ("compared with one device", "verified" if about.verified else "unverified"),
    ]
    if about.resumed:
        facts.append(("resumed", "; ".join(map(date_text, about.resumed))))
    for stage, units in enumerate(about.units):  # if there are many, the first and the last
        abbreviated = len(units) > 3
        text = f"{units[0]} to {units[-1]}, {pluralize(len(units), 'module')}" if abbreviated else ", ".join(units)
        facts.append((f"stage {stage}", text))
    return facts

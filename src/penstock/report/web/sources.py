"""A path -> the contents of a report: the folder of a run, a plan, or whatever `penstock explain` reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import json_or_none
from penstock.plan import Plan
from penstock.plan.explain import Explanation, Prediction, TraceSteps, explain, load_trace, steps_of_trace
from penstock.report.web.contents import Contents
from penstock.report.web.explained import from_explanation, from_serialized
from penstock.report.web.planned import from_plan
from penstock.report.web.run_folder import from_run
from penstock.schedule.timeline import Timeline
from penstock.trace.runs import read_run as read_folder
from penstock.trace.runs.folder import ABOUT, TIMELINES

Predictor = Callable[[TraceSteps], Prediction | None]
"""Predicts a run, once its stages are known."""


def is_fabric(path: Path) -> bool:
    """Whether a folder has a run of `penstock fabric` in it."""
    data = json_or_none(path / ABOUT) if path.is_dir() else None
    return isinstance(data, dict) and "workload" in data and "hosts" in data


def load_contents(
    paths: Sequence[Path],
    step: int | None = None,
    prediction: Predictor | None = None,
    what_ifs: Sequence[str] = (),
) -> Contents:
    """Build the report of these files or this folder.

    Args:
        paths: the folder of a run; a plan; or timelines, traces and columns, as `penstock.plan.explain.load_trace`
            reads them.
        step: which step; None: the one whose time is the median.
        prediction: of the run, to compare with; None: what a run's folder has of its own.
        what_ifs: changes to try on a step that can be explained, as `penstock explain --what-if` takes them.

    Raises:
        ArgumentError: they are none of these, or have no such step, or a what-if is none.
    """
    first = paths[0]
    if len(paths) == 1 and first.is_dir() and (first / ABOUT).exists():
        return _load_folder(first, step, prediction, what_ifs)
    data = json_or_none(first) if len(paths) == 1 and first.suffix == ".json" else None
    if isinstance(data, dict) and "choice" in data:
        return from_plan(Plan.from_dict(data, f"plan {str(first)!r}"), first.name)
    serialized = _serialized_timelines(data)
    if serialized and not what_ifs:
        return from_serialized(serialized, first.name)
    names = ", ".join(path.name or str(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    files = _files(paths)
    predicted = None if prediction is None else prediction(_read(files))
    explanation = _explain(files, step, predicted, tuple(what_ifs))
    fits = predicted is not None and not predicted.unlikely([stage.seconds for stage in explanation.stages])
    return from_explanation(explanation, names, predicted.costs if predicted is not None and fits else ())


def _load_folder(path: Path, step: int | None, prediction: Predictor | None, what_ifs: Sequence[str]) -> Contents:
    run = read_folder(path)
    timelines, damaged = run.timelines()
    if step is not None and step not in timelines:
        run.timeline(step)  # raises: names the steps, or the damage
    last = max(timelines, default=None) if step is None else step
    if not what_ifs and (last is None or any(timeline.serialized for timeline in timelines.values())):
        return from_run(run, None, last, damaged)
    try:
        trace = _read(files := _files([path]))
    except ArgumentError as error:  # a crash may have left no step whole
        if what_ifs:
            raise
        return from_run(run, None, last, (*damaged, str(error)))
    predicted = prediction(trace) if prediction else Prediction.of_run(run)
    explanation = _explain(files, step, predicted, tuple(what_ifs))
    return from_run(run, explanation, explanation.step.number, other_prediction=prediction is not None)


_Files = tuple[tuple[Path, ...], tuple[tuple[Path, int, int], ...]]
"""The paths to read, and each file with its size and time of change."""


def _files(paths: Sequence[Path]) -> _Files:
    folders = [folder for path in paths for folder in (path, path / TIMELINES) if folder.is_dir()]
    files = [*paths, *(file for folder in folders for file in sorted(folder.iterdir()))]
    stats = ((file, file.stat()) for file in files if file.exists())
    return tuple(paths), tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


@lru_cache(maxsize=4)
def _read(files: _Files) -> TraceSteps:
    """Read the steps of files or a folder: once for all what-ifs that are tried on them."""
    return steps_of_trace(load_trace(files[0]))


@lru_cache(maxsize=32)
def _explain(files: _Files, step: int | None, predicted: Prediction | None, what_ifs: tuple[str, ...]) -> Explanation:
    return explain(_read(files), step=step, predicted=predicted, what_ifs=what_ifs)


def _serialized_timelines(data: Any) -> list[Timeline]:
    """Return the timelines of a file if its ranks were serialized; none if it is something else."""
    items = data if isinstance(data, list) else [data]
    if all(isinstance(d, dict) and "ranks" in d for d in items) and any(d.get("in_turns") for d in items):
        return [Timeline.from_dict(item) for item in items]
    return []

"""A path -> what a report shows: the folder of a run, a plan, or whatever `penstock explain` reads."""

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
from penstock.report.web.explained import in_turns, of_explanation
from penstock.report.web.planned import of_plan
from penstock.report.web.run_folder import of_run
from penstock.schedule.timeline import Timeline
from penstock.trace.runs import read_run as read_folder
from penstock.trace.runs.folder import ABOUT, TIMELINES

PredictionOf = Callable[[TraceSteps], Prediction | None]
"""What was predicted of a run, once its stages are known."""


def is_fabric(path: Path) -> bool:
    """Whether a folder has a run of `penstock fabric` in it."""
    given = json_or_none(path / ABOUT) if path.is_dir() else None
    return isinstance(given, dict) and "workload" in given and "hosts" in given


def contents_of(
    paths: Sequence[Path],
    step: int | None = None,
    prediction: PredictionOf | None = None,
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
        return _of_folder(first, step, prediction, what_ifs)
    given = json_or_none(first) if len(paths) == 1 and first.suffix == ".json" else None
    if isinstance(given, dict) and "choice" in given:
        return of_plan(Plan.from_dict(given, f"plan {str(first)!r}"), first.name)
    turns = _in_turns(given)
    if turns and not what_ifs:
        return in_turns(turns, first.name)
    names = ", ".join(path.name or str(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    files = _files(paths)
    predicted = None if prediction is None else prediction(_read(files))
    found = _explained(files, step, predicted, tuple(what_ifs))
    known = predicted is not None and not predicted.unlikely([one.seconds for one in found.stages])
    return of_explanation(found, names, predicted.costs if predicted is not None and known else ())


def _of_folder(path: Path, step: int | None, prediction: PredictionOf | None, what_ifs: Sequence[str]) -> Contents:
    run = read_folder(path)
    timelines, damaged = run.timelines()
    if step is not None and step not in timelines:
        run.timeline(step)  # says which there are, or what is wrong with it
    last = max(timelines, default=None) if step is None else step
    if not what_ifs and (last is None or any(one.serialized for one in timelines.values())):
        return of_run(run, None, last, damaged)
    try:
        known = _read(files := _files([path]))
    except ArgumentError as error:  # a crash may have left no step whole
        if what_ifs:
            raise
        return of_run(run, None, last, (*damaged, str(error)))
    before = run.predicted()
    own = None if before is None else Prediction(before.stage_seconds, before.step_seconds)
    found = _explained(files, step, prediction(known) if prediction else own, tuple(what_ifs))
    return of_run(run, found, found.step.number, other_prediction=prediction is not None)


_Files = tuple[tuple[Path, ...], tuple[tuple[Path, int, int], ...]]
"""What is read, and each file of it with its size and when it changed."""


def _files(paths: Sequence[Path]) -> _Files:
    folders = [folder for path in paths for folder in (path, path / TIMELINES) if folder.is_dir()]
    files = [*paths, *(file for folder in folders for file in sorted(folder.iterdir()))]
    found = ((file, file.stat()) for file in files if file.exists())
    return tuple(paths), tuple((file, about.st_size, about.st_mtime_ns) for file, about in found)


@lru_cache(maxsize=4)
def _read(files: _Files) -> TraceSteps:
    """Read the steps of files or a folder: once for all what-ifs that are tried on them."""
    return steps_of_trace(load_trace(files[0]))


@lru_cache(maxsize=32)
def _explained(files: _Files, step: int | None, predicted: Prediction | None, what_ifs: tuple[str, ...]) -> Explanation:
    return explain(_read(files), step=step, predicted=predicted, what_ifs=what_ifs)


def _in_turns(given: Any) -> list[Timeline]:
    """Return the timelines of a file if its ranks were serialized; none if it is something else."""
    several = given if isinstance(given, list) else [given]
    if all(isinstance(one, dict) and "ranks" in one for one in several) and any(one.get("in_turns") for one in several):
        return [Timeline.from_dict(one) for one in several]
    return []

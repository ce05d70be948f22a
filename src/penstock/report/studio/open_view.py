"""The page's view of a run, a plan, a trace or a schedule in a file, and of what-ifs on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import read_text
from penstock.report.studio.query import MAX_SIZES
from penstock.report.web.sources import load_contents
from penstock.report.web.timeline_data import band, timeline_data
from penstock.schedule import Schedule, from_csv
from penstock.schedule.check import require_legal
from penstock.simulate import StageCost, simulate
from penstock.trace.columns import has_times
from penstock.trace.formats import SUFFIXES
from penstock.trace.runs import is_run, read_run

_MAX_SHOWN = 100_000
"""Maximum number of actions of one timeline."""
_MAX_WHAT_IFS = 8
_CHUNKS = re.compile(r"schedule=[^,/]*/(\d+)")
_CUTS = "A plan keeps what a stage takes, not what each module does, so its cuts cannot be dragged; those of a run can."


def open_view(path: Path, name: str, step: int | None = None, what_ifs: Sequence[str] = ()) -> dict[str, Any]:
    """Return the view of a path, for the page.

    Args:
        name: what the page calls it.
        step: of a run or trace; None: the typical one.
        what_ifs: changes to try on a run or trace, as `penstock explain --what-if` takes them.

    Raises:
        ArgumentError: it is nothing that can be shown, or a what-if is none.
        ScheduleError: it is a schedule that cannot be run.
    """
    if len(what_ifs) > _MAX_WHAT_IFS:
        raise ArgumentError(f"{len(what_ifs)} what-ifs: the studio tries up to {_MAX_WHAT_IFS} at once")
    for chunks in _CHUNKS.findall(",".join(what_ifs)):
        if len(chunks) > 2 or int(chunks) > MAX_SIZES["chunks"]:
            raise ArgumentError(f"{chunks[:20]} chunks: the studio tries up to {MAX_SIZES['chunks']}")
    if path.is_dir() and not any(file.name.endswith(SUFFIXES) for file in path.iterdir()):
        raise ArgumentError(f"{name!r} is a folder without a run; open a run, or a file in it")
    if path.name.removesuffix(".gz").endswith(".csv") and (schedule := _read_schedule(path)) is not None:
        return _view_schedule(schedule, name)
    contents = load_contents([path], step, what_ifs=what_ifs)
    if contents.plan is not None:
        plan_data = {
            "plan": contents.plan.to_dict(),
            "rows_per_second": contents.plan.rows_per_second,
            "bubble": contents.plan.bubble,
        }
        note = " ".join((*contents.warnings, _CUTS))
        return {"kind": "plan", "name": name, **plan_data, "note": note} | _timeline(contents.bands)
    explanation = contents.explanation
    if explanation is None:
        return {"kind": "unexplained", "name": name, "note": " ".join(contents.warnings)} | _timeline(contents.bands)
    order = explanation.step.slowest.schedule
    # a run's schedule is known by name: on one rank all orders look alike
    schedule_name = read_run(path).about.schedule if is_run(path) else order.name
    run_data = {"schedule": schedule_name, "depth": order.placement.depth, "explanation": explanation.to_dict()}
    return {"kind": "run", "name": name, **run_data} | _timeline(contents.bands)


def _timeline(bands: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the timeline of these bands; None if there are none, or too many actions."""
    actions = sum(len(rank["start"]) for band in bands for rank in band["ranks"])
    if actions > _MAX_SHOWN:
        note = f"{actions:,} actions are too many to draw here; the full report shows them"
        return {"timeline": None, "note": note}
    return {"timeline": timeline_data(bands) if bands else None}


def _read_schedule(path: Path) -> Schedule | None:
    """Read the schedule in a CSV; None if it has columns of events instead."""
    text = read_text(path, repr(path.name))
    if has_times(text):
        return None
    return require_legal(from_csv(text, path.stem), path.name)


def _view_schedule(schedule: Schedule, name: str) -> dict[str, Any]:
    if sum(map(len, schedule.rows)) > _MAX_SHOWN:
        raise ArgumentError(f"{name!r} has more than {_MAX_SHOWN:,} actions: use `penstock draw --csv`")
    timeline = simulate(schedule, StageCost(1.0, 1.0, 1.0))
    return {
        "kind": "schedule",
        "name": name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "span": timeline.span_seconds,
        "bubble": timeline.bubble_rate,
        "timeline": timeline_data([band(schedule.name, timeline, schedule)], unit="units"),
        "note": "F, I and W of each stage take 1, and messages nothing",
    }

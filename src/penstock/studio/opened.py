"""What the page shows of a run, a plan, a trace or a schedule in a file, and the what-ifs that are tried on it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock._base.files import read_json, read_text
from penstock.errors import ArgumentError
from penstock.explain import Explanation, Run, explain, run_of
from penstock.explain import read_run as read_trace
from penstock.explain.reading import SUFFIXES
from penstock.plan import Plan
from penstock.runs import read_run
from penstock.runs.folder import ABOUT
from penstock.schedule import Schedule, from_csv
from penstock.schedule.check import require_legal
from penstock.simulate import StageCost, simulate
from penstock.studio.question import MAX_SIZES
from penstock.web.measured import of_explanation
from penstock.web.page_data import band, timeline_data
from penstock.web.planned import of_plan
from penstock.web.run_folder import of_run
from penstock.web.sources import shown

_MAX_SHOWN = 100_000
"""Actions of one timeline."""
_MAX_WHAT_IFS = 8
_CHUNKS = re.compile(r"schedule=[^,/]*/(\d+)")
_CUTS = "A plan keeps what a stage takes, not what each module does, so its cuts cannot be dragged; those of a run can."


def opened(path: Path, name: str, step: int | None = None, what_ifs: Sequence[str] = ()) -> dict[str, Any]:
    """What is at a path, for the page.

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
    if path.is_dir():
        return _of_folder(path, name, step, what_ifs)
    if path.name.removesuffix(".gz").endswith(".csv") and (schedule := _schedule(path)) is not None:
        return _of_schedule(schedule, name)
    if path.suffix == ".json":
        given = read_json(path, repr(name))
        if isinstance(given, dict) and "choice" in given:
            return _of_plan(Plan.from_dict(given, f"plan {name!r}"), name)
    return _of_trace(path, name, step, what_ifs)


def _of_trace(path: Path, name: str, step: int | None, what_ifs: Sequence[str]) -> dict[str, Any]:
    """A trace in a file, or in the files of a folder."""
    found = _explained(path, _stamp(path), step, tuple(what_ifs))
    bands = of_explanation(found, name).bands
    return _of_step(found, name, found.step.slowest.schedule.name, bands)


def _stamp(path: Path) -> float:
    """Changes when what is at a path changes."""
    newest = path / "timelines" if path.is_dir() else path
    return (newest if newest.exists() else path).stat().st_mtime


@lru_cache(maxsize=4)
def _steps(path: Path, stamp: float) -> Run:
    return run_of(read_trace([path]))


@lru_cache(maxsize=32)
def _explained(path: Path, stamp: float, step: int | None, what_ifs: tuple[str, ...]) -> Explanation:
    return explain(_steps(path, stamp), step=step, what_ifs=what_ifs)


def _of_folder(path: Path, name: str, step: int | None, what_ifs: Sequence[str]) -> dict[str, Any]:
    """The folder of a run, whose schedule is known by name: on one rank all orders look alike."""
    if not (path / ABOUT).exists():
        if not any(one.name.endswith(SUFFIXES) for one in path.iterdir()):
            raise ArgumentError(f"{name!r} is a folder without a run; open a run, or a file in it")
        return _of_trace(path, name, step, what_ifs)
    run = read_run(path)
    try:
        found = _explained(path, _stamp(path), step, tuple(what_ifs))
    except ArgumentError:
        if what_ifs:
            raise
        view = shown([path], step)  # which shows what cannot be explained, or says why not
        return {"kind": "unexplained", "name": name, "note": " ".join(view.warnings)} | _drawn(view.bands)
    bands = of_run(run, found, found.step.number).bands
    return _of_step(found, name, run.about.schedule, bands)


def _of_step(found: Explanation, name: str, schedule: str, bands: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    rank_of = found.step.slowest.schedule.placement.rank_of
    cuts = [{"cut": stage, "rank": rank_of[stage]} for stage in range(1, found.step.slowest.schedule.placement.depth)]
    said = {"kind": "run", "name": name, "schedule": schedule, "explanation": found.to_dict(), "cuts": cuts}
    return said | _drawn(bands)


def _drawn(bands: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The timeline of these bands; None if there are none, or too many actions."""
    given = [dict(one) for one in bands]
    actions = sum(len(rank["start"]) for one in given for rank in one["ranks"])
    if actions > _MAX_SHOWN:
        note = f"{actions:,} actions are too many to draw here; the full report shows them"
        return {"timeline": None, "note": note}
    return {"timeline": timeline_data(given, unit="s") if given else None}


def _of_plan(plan: Plan, name: str) -> dict[str, Any]:
    view = of_plan(plan, name)
    return {
        "kind": "plan",
        "name": name,
        "plan": plan.to_dict(),
        "rows_per_second": plan.rows_per_second,
        "bubble": plan.bubble,
        "note": " ".join((*view.warnings, _CUTS)),
    } | _drawn(view.bands)


def _schedule(path: Path) -> Schedule | None:
    """The schedule in a CSV; None if it has columns of events instead."""
    text = read_text(path, repr(path.name))
    if "start_us" in text.partition("\n")[0]:
        return None
    return require_legal(from_csv(text, path.stem), path.name)


def _of_schedule(schedule: Schedule, name: str) -> dict[str, Any]:
    if sum(map(len, schedule.rows)) > _MAX_SHOWN:
        raise ArgumentError(f"{name!r} has more than {_MAX_SHOWN:,} actions: use `penstock show --csv`")
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

"""What the page shows of a run, a plan, a trace or a schedule in a file, and the what-ifs that are tried on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.errors import ArgumentError, ScheduleError
from penstock.explain import Explanation, Run, explain, run_of
from penstock.explain import read_run as read_trace
from penstock.json_files import read_json
from penstock.plan import Plan
from penstock.runs import is_run
from penstock.schedule import Schedule, check, from_csv, summary
from penstock.simulate import StageCost, simulate
from penstock.web.page_data import band, timeline_data

_MOST_SHOWN = 100_000
"""Actions of one timeline."""
_MOST_WHAT_IFS = 8


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
    if len(what_ifs) > _MOST_WHAT_IFS:
        raise ArgumentError(f"{len(what_ifs)} what-ifs: the studio tries up to {_MOST_WHAT_IFS} at once")
    if path.is_dir() and not is_run(path):
        raise ArgumentError(f"{name!r} is a folder without a run; open a run, or a file in it")
    if not path.is_dir():
        if path.name.removesuffix(".gz").endswith(".csv") and (schedule := _schedule(path)) is not None:
            return _of_schedule(schedule, name)
        if path.suffix == ".json":
            given = read_json(path, repr(name))
            if isinstance(given, dict) and "choice" in given:
                return _of_plan(Plan.from_dict(given, f"plan {name!r}"), name)
    return _of_run(_explained(path, _stamp(path), step, tuple(what_ifs)), name)


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


def _of_run(found: Explanation, name: str) -> dict[str, Any]:
    slowest = found.step.slowest
    schedule, timeline = slowest.schedule, slowest.timeline
    shown = len(timeline) <= _MOST_SHOWN
    return {
        "kind": "run",
        "name": name,
        "explanation": found.to_dict(),
        "cuts": [
            {"cut": stage, "rank": schedule.placement.rank_of[stage]} for stage in range(1, schedule.placement.depth)
        ],
        "timeline": timeline_data([band("measured", timeline, schedule)], unit="s") if shown else None,
        "note": "" if shown else f"{len(timeline):,} actions are too many to draw here: see `penstock report`",
    }


def _of_plan(plan: Plan, name: str) -> dict[str, Any]:
    choice = plan.choice
    schedule = plan.schedule
    if not isinstance(schedule, Schedule):
        from penstock.schedule import generate

        schedule = generate(choice.schedule, choice.ranks, choice.microbatches, choice.chunks)
    thirds = [StageCost(each / 3, each / 3, each / 3) for each in plan.stage_seconds]
    timeline = simulate(schedule, thirds)
    return {
        "kind": "plan",
        "name": name,
        "plan": plan.to_dict(),
        "rows_per_second": plan.rows_per_second,
        "bubble": plan.bubble,
        "timeline": timeline_data([band(schedule.name, timeline, schedule)], unit="s"),
        "note": "a plan says what a stage takes as a whole: F, I and W are drawn as thirds of it, messages as free",
    }


def _schedule(path: Path) -> Schedule | None:
    """The schedule in a CSV; None if it has columns of events instead."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "start_us" in text.partition("\n")[0]:
        return None
    schedule = from_csv(text, path.stem)
    if wrong := [violation for violation in check(schedule) if violation.fatal]:
        raise ScheduleError(f"{path.name} holds no legal schedule: {wrong[0].kind}: {summary(wrong, 1)}")
    return schedule


def _of_schedule(schedule: Schedule, name: str) -> dict[str, Any]:
    if sum(map(len, schedule.rows)) > _MOST_SHOWN:
        raise ArgumentError(f"{name!r} has more than {_MOST_SHOWN:,} actions: use `penstock show --csv`")
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

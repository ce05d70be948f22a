"""`penstock runs`: the runs in a folder, a line for each."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock._base.errors import ArgumentError
from penstock._base.words import sized
from penstock.cli._options import JSON, argument, option, print_json, screen
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.trace.runs.summary import Summary

EPILOG = (
    "Step time runs from the end of one step to that of the next (median of the last 20); the loss is the last step's."
)
"""Epilog of the help."""

_DEEPEST = 3
Sort = Literal["started", "name", "model", "schedule", "ranks", "microbatches", "state", "loss", "seconds", "bubble"]
_STYLES = {"failed": "red", "silent": "red", "interrupted": "yellow", "training": "green"}


def runs(
    folder: Path = argument("Directory of the runs.", default=Path("runs")),
    sort: Sort = option("Sort key.", default="started"),
    words: str = option("Only runs whose row contains all of these words: 'zb-h1 failed'.", "--filter", default=""),
    as_json: bool = JSON,
) -> None:
    """List recorded runs: model, schedule, progress, speed and state."""
    found, damaged = _summaries(folder)
    asked = words.lower().split()
    found = [run for run in found if all(word in " ".join(_line(run, folder)).lower() for word in asked)]
    found.sort(key=lambda run: _key(run, sort))
    if as_json:
        print_json({"runs": [{"run": str(run.path), **run.to_dict()} for run in found], "damaged": damaged})
        return
    console = screen()
    if not found and words:
        console.print(f"no run in {folder}/ matches --filter {words!r}", markup=False)
    elif not found and not damaged:
        console.print(f"no runs in {folder}/: penstock.pipeline(..., run='{folder}/NAME') records one", markup=False)
    if found:
        heads = (
            "run",
            "model",
            "schedule",
            "ranks",
            "micro-\nbatches",
            "step",
            "step time",
            "loss",
            "bubble",
            "state",
            "started",
        )
        lines = table(*heads, left=3)
        for run in found:
            lines.add_row(*_line(run, folder), style=_STYLES.get(run.state))
        print_unbroken(console, lines)
    for sentence in damaged:
        console.print(sentence, style="red", markup=False)


def _summaries(folder: Path) -> tuple[list[Summary], list[str]]:
    """The runs below a folder, and a sentence for each that is damaged. Raises ArgumentError if there is no folder."""
    from penstock.trace.runs import is_run
    from penstock.trace.runs.folder import ABOUT
    from penstock.trace.runs.summary import Summary

    if not folder.is_dir():
        raise ArgumentError(
            f"there is no folder {str(folder)!r}; penstock.pipeline(..., run='{folder}/NAME') makes one"
        )
    found = [
        Summary.of_one(about.parent)
        for depth in range(_DEEPEST + 1)
        for about in sorted(folder.glob("*/" * depth + ABOUT))
        if "earlier" not in about.relative_to(folder).parts and is_run(about.parent)
    ]
    return [run for run in found if isinstance(run, Summary)], [why for why in found if isinstance(why, str)]


def figures(run: Summary) -> dict[str, str]:
    """What of a run is compared, as text."""
    from penstock.trace.runs.progress import in_time

    said = run.progress
    return {
        "steps": "-" if said is None else f"{said.step:,}",
        "step time": "-" if said is None or said.seconds is None else in_time(said.seconds),
        "samples/s": "-" if said is None or said.rows_per_second is None else f"{said.rows_per_second:,.4g}",
        "loss": "-" if said is None or said.loss is None else f"{said.loss:#.4g}".removesuffix("."),
        "bubble": "-" if said is None or said.bubble is None else f"{said.bubble:.0%}",
        "peak process memory": "-" if run.peak_bytes is None else sized(run.peak_bytes),
    }


def _line(run: Summary, folder: Path) -> list[str]:
    about, said = run.about, figures(run)
    ranks = f"{about.replicas} x {about.ranks}" if about.replicas > 1 else str(about.ranks)
    name = "." if run.path == folder else run.path.relative_to(folder).as_posix()
    started = datetime.fromisoformat(about.started).astimezone().strftime("%Y-%m-%d %H:%M")
    shown = [said[key] for key in ("steps", "step time", "loss", "bubble")]
    return [name, about.model, about.schedule, ranks, str(about.microbatches), *shown, run.state, started]


def _key(run: Summary, by: str) -> tuple[bool, float | str]:
    """Runs without a figure come last."""
    if by == "state":
        return False, run.state
    of = run.progress if by in ("loss", "seconds", "bubble") else run.about
    value = None if of is None else getattr(of, by)
    return value is None or value != value, value or 0.0

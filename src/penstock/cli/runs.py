"""`penstock runs`: lists the runs in a directory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock._base.formatting import format_bytes, short_duration
from penstock.cli._options import JSON, argument, option, print_json, screen
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.trace.runs.summary import RunSnapshot

EPILOG = (
    "Step time runs from the end of one step to that of the next (median of the last 20); the loss is the last step's."
)
"""Epilog of the help."""

Sort = Literal["started", "name", "model", "schedule", "ranks", "microbatches", "state", "loss", "seconds", "bubble"]
_STYLES = {"failed": "red", "silent": "red", "interrupted": "yellow", "training": "green"}


def runs(
    folder: Path = argument("Directory of the runs.", default=Path("runs")),
    sort: Sort = option("Sort key.", default="started"),
    words: str = option("Only runs whose row contains all of these words: 'zb-h1 failed'.", "--filter", default=""),
    as_json: bool = JSON,
) -> None:
    """List recorded runs: model, schedule, progress, speed and state."""
    from penstock.trace.runs.summary import list_runs

    summaries, damaged = list_runs(folder)
    terms = words.lower().split()
    summaries = [run for run in summaries if all(word in " ".join(_line(run, folder)).lower() for word in terms)]
    summaries.sort(key=lambda run: _key(run, sort))
    if as_json:
        print_json({"runs": [{"run": str(run.path), **run.to_dict()} for run in summaries], "damaged": damaged})
        return
    console = screen()
    if not summaries and words:
        console.print(f"no run in {folder}/ matches --filter {words!r}")
    elif not summaries and not damaged:
        console.print(f"no runs in {folder}/: penstock.pipeline(..., run_dir='{folder}/NAME') records one")
    if summaries:
        heads = ("run", "model", "schedule", "ranks", "micro-\nbatches", "step", "step time", "loss", "bubble")
        lines = table(*heads, "state", "started", left=3)
        for run in summaries:
            lines.add_row(*_line(run, folder), style=_STYLES.get(run.state))
        print_unbroken(console, lines)
    for error in damaged:
        console.print(error, style="red")


def figures(run: RunSnapshot) -> dict[str, str]:
    """Return the metrics of a run to compare, as text."""

    def text(value: Any, form: Callable[[Any], str]) -> str:
        return "-" if value is None else form(value)

    progress = run.progress
    return {
        "steps": text(progress and progress.step, "{:,}".format),
        "step time": text(progress and progress.seconds, short_duration),
        "samples/s": text(progress and progress.rows_per_second, "{:,.4g}".format),
        "loss": text(progress and progress.loss, lambda loss: f"{loss:#.4g}".removesuffix(".")),
        "bubble": text(progress and progress.bubble, "{:.0%}".format),
        "peak process memory": text(run.peak_bytes, format_bytes),
    }


def _line(run: RunSnapshot, folder: Path) -> list[str]:
    about, metrics = run.about, figures(run)
    ranks = f"{about.replicas} x {about.ranks}" if about.replicas > 1 else str(about.ranks)
    name = "." if run.path == folder else run.path.relative_to(folder).as_posix()
    started = datetime.fromisoformat(about.started).astimezone().strftime("%Y-%m-%d %H:%M")
    shown = [metrics[key] for key in ("steps", "step time", "loss", "bubble")]
    return [name, about.model, about.schedule, ranks, str(about.microbatches), *shown, run.state, started]


def _key(run: RunSnapshot, by: str) -> tuple[bool, float | str]:
    """Return the sort key of a run. Runs without a value come last."""
    if by == "state":
        return False, run.state
    source = run.progress if by in ("loss", "seconds", "bubble") else run.about
    value = None if source is None else getattr(source, by)
    return value is None or value != value, value or 0.0

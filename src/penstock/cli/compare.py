"""`penstock compare`: shows runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.cli._options import JSON, REQUIRED, argument, print_json, screen
from penstock.cli.runs import figures
from penstock.report.text import print_unbroken, table


def compare(
    runs: list[Path] = argument("Directories of recorded runs.", metavar="RUN RUN...", default=REQUIRED),
    as_json: bool = JSON,
) -> None:
    """Compare recorded runs: the settings in which they differ, speed, bubble, memory, and the loss at the same steps.

    Percentages are relative to the first run.
    """
    from penstock.trace.runs import read_run
    from penstock.trace.runs.summary import RunSnapshot, common_steps, differences

    if len(runs) < 2:
        raise ArgumentError(f"compare {runs[0]}: expected two runs or more")
    summaries = [RunSnapshot.of(read_run(path), most_bytes=None) for path in runs]
    settings, steps = differences(summaries), common_steps(summaries)
    loss_by_step = [{record.step: record.loss for record in run.steps} for run in summaries]
    losses = [[losses.get(step) for step in steps] for losses in loss_by_step]
    if as_json:
        rows = [{"run": str(run.path), **run.to_dict()} for run in summaries]
        print_json({"runs": rows, "differ": settings, "steps": steps, "losses": losses})
        return
    console = screen()
    lines = table("run", *(str(path) for path in runs), left=1)
    for name, values in settings.items():
        lines.add_row(name, *map(_text, values))
    lines.add_section()
    times = [run.progress.seconds if run.progress else None for run in summaries]
    for name, first in figures(summaries[0]).items():
        other_values = [figures(run)[name] for run in summaries[1:]]
        if name == "step time" and times[0] is not None:
            changes = ["" if time is None else f" ({time / times[0] - 1:+.1%})" for time in times[1:]]
            other_values = [*map("{}{}".format, other_values, changes)]
        lines.add_row(name, first, *other_values)
    lines.add_section()
    for step, *values in zip(steps, *losses, strict=True):
        lines.add_row(f"loss at step {step:,}", *("-" if value is None else f"{value:.6g}" for value in values))
    print_unbroken(console, lines)
    if not settings:
        console.print("These runs have the same settings.")
    if not steps:
        console.print("These runs have no step in common.")


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, str):
        return (value[:12] if len(value) > 40 else value) or "no"
    return "none" if value is None else str(value)

"""`penstock compare`: runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.files import finite
from penstock.cli._options import Json, spread
from penstock.cli.runs import figures
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.trace.runs.summary import Summary


@spread
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of recorded runs.")],
    as_json: Json = False,
) -> None:
    """Compare recorded runs: the settings in which they differ, speed, bubble, memory, and the loss at the same steps.

    Percentages are relative to the first run.
    """
    from penstock.trace.runs import read_run
    from penstock.trace.runs.summary import Summary, differences, same_steps

    if len(runs) < 2:
        raise ArgumentError(f"compare {runs[0]}: expected two runs or more")
    found = [Summary.of(read_run(path)) for path in runs]
    settings, steps = differences(found), same_steps(found)
    losses = [[by.get(step) for step in steps] for by in ({one.step: one.loss for one in run.steps} for run in found)]
    if as_json:
        told = [{"run": str(run.path), **run.to_dict()} for run in found]
        print(json.dumps(finite({"runs": told, "differ": settings, "steps": steps, "losses": losses})))
        return
    console = Console(highlight=False)
    lines = table("", *(str(path) for path in runs), left=1)
    for name, values in settings.items():
        lines.add_row(name, *map(_text, values))
    lines.add_section()
    for name in figures(found[0]):
        lines.add_row(name, *_relative(name, found))
    lines.add_section()
    for step, *values in zip(steps, *losses, strict=True):
        lines.add_row(f"loss at step {step:,}", *("-" if value is None else f"{value:.6g}" for value in values))
    print_unbroken(console, lines)
    if not settings:
        console.print("The settings of these runs are the same.")
    if not steps:
        console.print("These runs have no step in common.")


def _relative(name: str, runs: list[Summary]) -> list[str]:
    """A figure of each run, with how far times are from the first run's."""
    cells = [figures(run)[name] for run in runs]
    times = [run.progress.seconds if run.progress else None for run in runs]
    if name != "step time" or times[0] is None:
        return cells
    return [
        cell if not place or one is None else f"{cell} ({one / times[0] - 1:+.1%})"
        for place, (cell, one) in enumerate(zip(cells, times, strict=True))
    ]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return {None: "none", "": "no"}.get(
        value, str(value)[:12] if isinstance(value, str) and len(value) > 40 else str(value)
    )

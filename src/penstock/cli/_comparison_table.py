"""The table that `penstock verify` prints: one row per value that was compared, equal ones folded by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock._base.words import counted
from penstock.report.text import table

LONG_TABLE = 24
"""In a table with more rows than this, equal ones are folded by module."""

_STYLES = {"equal": "green", "close": "yellow"}


def show(report: Mapping[str, Any], console: Console, *, show_all: bool = False) -> None:
    """Prints what was compared, one row per value, and the summary."""
    rows = report["rows"]
    lines = list(fold(rows)) if len(rows) > LONG_TABLE and not show_all else rows
    steps = ["step"] if any(line.get("step") for line in lines) else []
    made = table("value", "name", "stage", "verdict", "max|difference|", *steps, left=4, overflow="fold")
    for column in made.columns:
        column.no_wrap = column.header != "name"
    for line in lines:
        verdict = Text(line["verdict"], _STYLES.get(line["verdict"], "bold red"))
        step = [str(line["step"])] if line.get("step") else []
        stages = ", ".join(map(str, line["stages"]))
        made.add_row(line["kind"], Text(line["name"]), stages, verdict, f"{line['max_difference']:.3g}", *step)
    console.print(made)
    counts = {"rank": report["ranks"], "stage": report["stages"], "microbatch": report["microbatches"]}
    if report["replicas"] > 1:
        counts = {"replica": report["replicas"]} | counts
    sizes = ", ".join(counted(count, what) for what, count in counts.items())
    if report["notes"]:
        console.print("\n" + "\n".join(f"note: {note}" for note in report["notes"]), soft_wrap=True, markup=False)
    whole = report["whole_batch"]
    if whole is not None and whole["verdict"] == "explained":
        console.print(f"\nwhole batch: {whole['text']}", soft_wrap=True, markup=False)
    console.print(f"\n{report['schedule']}, {sizes}: {report['summary']}", soft_wrap=True, markup=False)


def fold(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Merges neighboring rows of one block that are all equal, or all undefined; keeps the others as they are."""

    def key(row: Mapping[str, Any]) -> Any:
        place = block(row["name"]) if row["kind"] in ("gradient", "buffer") else row["name"].partition(" in ")[2]
        alike = row["verdict"] in ("equal", "undefined")
        return (row["kind"], place, *row["stages"], row["verdict"], row.get("step", 0)) if alike else row

    for _, group in groupby(rows, key):
        first, *others = group
        if others:
            place, _, phase = first["name"].partition(" in ")
            count = len(others) + 1
            of_block = first["kind"] in ("gradient", "buffer")
            name = f"{block(place)}.* ({count})" if of_block else f"all {count}{phase and f' in {phase}'}"
            first = {**first, "name": name}
        yield first


def block(name: str) -> str:
    """The repeated block that a parameter is in (`layers.3` for `layers.3.norm.weight`), or otherwise its module."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:end])

"""The table that `penstock verify` prints: one row per value that was compared, equal ones folded by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock.report.text import table
from penstock.words import counted

LONG_TABLE = 24
"""In a table with more rows than this, equal ones are folded by module."""

_STYLES = {"equal": "green", "close": "yellow"}


def show(report: Mapping[str, Any], console: Console, *, show_all: bool = False) -> None:
    """Prints what was compared, one row per value, and the summary."""
    rows = report["rows"]
    lines = list(fold(rows)) if len(rows) > LONG_TABLE and not show_all else [Line.of(row) for row in rows]
    steps = ["step"] if any(line.step for line in lines) else []
    made = table("value", "name", "stage", "verdict", "max|difference|", *steps, left=4, overflow="fold")
    for column in made.columns:
        column.no_wrap = column.header != "name"
    for line in lines:
        verdict = Text(line.verdict, _STYLES.get(line.verdict, "bold red"))
        step = [str(line.step)] if line.step else []
        stages = ", ".join(map(str, line.stages))
        made.add_row(line.kind, Text(line.name), stages, verdict, f"{line.difference:.3g}", *step)
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


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table: one comparison, or several whose values are equal."""

    kind: str
    name: str
    stages: tuple[int, ...]
    verdict: str
    difference: float
    step: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Line:
        stages, step = tuple(row["stages"]), row.get("step", 0)
        return cls(row["kind"], row["name"], stages, row["verdict"], row["max_difference"], step)


def fold(rows: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """Merges neighboring rows of one block that are all equal, or all undefined; keeps the others as they are."""

    def key(line: Line) -> tuple[Any, ...]:
        place = block(line.name) if line.kind in ("gradient", "buffer") else line.name.partition(" in ")[2]
        alike = line.verdict in ("equal", "undefined")
        return (line.kind, place, line.stages, line.verdict, line.step) if alike else (line,)

    for _, group in groupby(map(Line.of, rows), key):
        first, *others = group
        if others:
            place, _, phase = first.name.partition(" in ")
            count = len(others) + 1
            of_block = first.kind in ("gradient", "buffer")
            name = f"{block(place)}.* ({count})" if of_block else f"all {count}{phase and f' in {phase}'}"
            first = replace(first, name=name)
        yield first


def block(name: str) -> str:
    """The repeated block that a parameter is in (`layers.3` for `layers.3.norm.weight`), or otherwise its module."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:end])

"""Table of `penstock verify`: one row per compared value, equal ones folded by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock._base.formatting import pluralize
from penstock.report.text import columns_table

LONG_TABLE = 24
"""Number of rows above which equal ones are folded by module."""

_STYLES = {"equal": "green", "close": "yellow"}
_BLOCK_KINDS = ("gradient", "buffer")
"""Values named after their module; others are named after a phase ("output 3 in evaluation")."""


def show(report: Mapping[str, Any], console: Console, *, show_all: bool = False) -> None:
    """Print the compared values, one per row, and the summary."""
    rows = report["rows"]
    lines = list(_fold(rows)) if len(rows) > LONG_TABLE and not show_all else rows
    verdicts = [line["verdict"] for line in lines]
    columns = {
        "value": [line["kind"] for line in lines],
        "name": [line["name"] for line in lines],
        "stage": [", ".join(map(str, line["stages"])) for line in lines],
        "verdict": [Text(verdict, _STYLES.get(verdict, "bold red")) for verdict in verdicts],
        "max|difference|": [f"{line['max_difference']:.3g}" for line in lines],
        "step": [line.get("step") or None for line in lines],
    }
    table = columns_table(columns, left=4)
    for column in table.columns:
        column.no_wrap, column.overflow = column.header != "name", "fold"
    console.print(table)
    counts = {"rank": report["ranks"], "stage": report["stages"], "microbatch": report["microbatches"]}
    if report["replicas"] > 1:
        counts = {"replica": report["replicas"]} | counts
    sizes = ", ".join(pluralize(count, noun) for noun, count in counts.items())
    notes = "\n".join(f"note: {note}" for note in report["notes"])
    full_batch = report["full_batch"]
    explained = f"full batch: {full_batch['text']}" if full_batch and full_batch["verdict"] == "explained" else ""
    for text in filter(None, (notes, explained, f"{report['schedule']}, {sizes}: {report['summary']}")):
        console.print(f"\n{text}", soft_wrap=True, markup=False)


def _fold(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Merge neighboring rows of a block that are all equal, or all undefined."""

    def key(row: Mapping[str, Any]) -> Any:
        group = _block(row["name"]) if row["kind"] in _BLOCK_KINDS else row["name"].partition(" in ")[2]
        foldable = row["verdict"] in ("equal", "undefined")
        return (row["kind"], group, *row["stages"], row["verdict"], row.get("step", 0)) if foldable else row

    for _, group in groupby(rows, key):
        first, *folded = group
        if folded:
            name, _, phase = first["name"].partition(" in ")
            count, of = len(folded) + 1, f" in {phase}" if phase else ""
            name = f"{_block(name)}.* ({count})" if first["kind"] in _BLOCK_KINDS else f"all {count}{of}"
            first = {**first, "name": name}
        yield first


def _block(name: str) -> str:
    """Return the repeated block of a parameter (`layers.3` for `layers.3.norm.weight`), or else its module."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:end])

"""Tables for a terminal, none of whose cells is cut off, and numbers in columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

TURNS = "no bubble: the ranks took turns in one process; simulate these times to see how they would overlap"


def table(*columns: str, left: int = 1) -> Table:
    """Build a table without lines, whose first `left` columns are left-aligned and the others right-aligned."""
    from rich.table import Table  # here and below, so that `penstock.report` does not load it

    built = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    lines = max(column.count("\n") for column in columns)
    for index, column in enumerate(columns):
        head = "\n" * (lines - column.count("\n")) + column
        built.add_column(head, justify="left" if index < left else "right")
    return built


def pairs(lines: Iterable[tuple[str | Text, str | Text]]) -> Table:
    """Build a table of two columns without headings, the first of which is never broken."""
    built = table("", "", left=2)
    built.show_header, built.columns[0].no_wrap = False, True
    for line in lines:
        built.add_row(*line)
    return built


def table_width(grid: Table, console: Console) -> int:
    """Return the width of a table, in characters, if no cell is broken."""
    return console.measure(grid, options=console.options.update(max_width=10_000)).maximum


def print_unbroken(console: Console, grid: Table) -> None:
    """Print a table without breaking or cutting off its cells; columns move closer if there is little room."""
    from rich.console import Console

    if table_width(grid, console) > console.width:
        grid.padding = (0, 1, 0, 0)
    width = max(table_width(grid, console), console.width)
    Console(file=console.file, highlight=False, markup=False, emoji=False, width=width).print(grid)


def columns_table(columns: Mapping[str, Iterable[object]], left: int = 1) -> Table:
    """Build a table of these columns. Cells are texts or numbers, None is a dash; a column without any other is left
    out."""
    from rich.text import Text

    cells_by_head = {head: [*cells] for head, cells in columns.items()}
    shown = {head: cells for head, cells in cells_by_head.items() if any(cell is not None for cell in cells)}
    built = table(*shown, left=sum(head in shown for head in [*columns][:left]))
    for row in zip(*shown.values(), strict=True):
        built.add_row(*(cell if isinstance(cell, Text) else Text("-" if cell is None else str(cell)) for cell in row))
    return built


def print_columns(console: Console, columns: Mapping[str, Iterable[object]], left: int = 1) -> None:
    """Print a table of these columns, unbroken."""
    print_unbroken(console, columns_table(columns, left))


_MIN, _MAX = 1e-12, 1e18
"""Range of the largest number for which no exponent is written."""


def make_format(values: Sequence[float], max_decimals: int | None = None) -> Callable[[float], str]:
    """Return the format for some numbers, with the decimals that they need.

    `max_decimals` defaults to five significant digits of the largest number. Numbers that are too small or large for
    that get five digits and an exponent.
    """
    largest = max(map(abs, values), default=0.0)
    if largest and not _MIN <= largest < _MAX:
        return lambda value: f"{value:.5g}"
    if max_decimals is None:
        max_decimals = max(0, 4 - math.floor(math.log10(largest))) if largest else 0
    slack = largest * 1e-9
    exact = (d for d in range(max_decimals) if all(abs(round(value, d) - value) <= slack for value in values))
    decimals = next(exact, max_decimals)
    return lambda value: f"{value:,.{decimals}f}"


def format_all(values: Sequence[float], max_decimals: int | None = None) -> list[str]:
    """Format each number in the common format of all."""
    return [*map(make_format(values, max_decimals), values)]

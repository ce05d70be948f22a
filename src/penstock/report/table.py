"""Tables without lines for a terminal, none of whose cells is cut off."""

from __future__ import annotations

from rich.console import Console, OverflowMethod
from rich.measure import Measurement
from rich.table import Table


def table(*columns: str, left: int = 1, overflow: OverflowMethod = "ellipsis") -> Table:
    """A table without lines, whose first `left` columns are left-aligned and the others right-aligned."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    lines = max(column.count("\n") for column in columns)
    for index, column in enumerate(columns):
        head = "\n" * (lines - column.count("\n")) + column
        made.add_column(head, justify="left" if index < left else "right", overflow=overflow)
    return made


def width_of(made: Table, console: Console) -> int:
    """The characters of a line that a table takes if no cell is broken."""
    return Measurement.get(console, console.options.update(max_width=10_000), made).maximum


def print_unbroken(console: Console, made: Table) -> None:
    """Prints a table without breaking or cutting off its cells; columns move closer if there is little room."""
    if width_of(made, console) > console.width:
        made.padding = (0, 1, 0, 0)
    Console(file=console.file, highlight=False, width=max(width_of(made, console), console.width)).print(made)

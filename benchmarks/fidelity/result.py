"""The errors of a set of measurements, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Result:
    """The errors of one set, beside those of the source's own tool (or a closed form) where it is published.

    Attributes:
        errors: predicted / measured - 1.
        theirs: the same figure of theirs, in percent, and what it is.
    """

    name: str
    figure: str
    errors: tuple[float, ...]
    theirs: str
    aim: str
    measured: bool = True

    @property
    def mean(self) -> float:
        """In percent, as the other figures."""
        return 100 * statistics.fmean(map(abs, self.errors))

    @property
    def median(self) -> float:
        return 100 * statistics.median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        return 100 * max(map(abs, self.errors))


def summed(errors: Iterable[float]) -> str:
    sizes = [100 * abs(error) for error in errors]
    return f"{statistics.fmean(sizes):.2f}, worst {max(sizes):.2f}"


def show(results: Sequence[Result], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("set", "figure", "rows", "MAPE %", "median %", "worst %", "theirs %", "aim %"):
        table.add_column(column, justify="left" if column in ("set", "figure", "theirs %", "aim %") else "right")
    for one in results:
        numbers = (f"{one.mean:.3f}", f"{one.median:.3f}", f"{one.worst:.3f}")
        table.add_row(one.name, one.figure, str(len(one.errors)), *numbers, one.theirs, one.aim)
    Console(width=150).print(table)

"""Print results as tables in a terminal, and compare two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.network.fabric.compare import MIN_SAMPLES
from penstock.network.fabric.samples import Run
from penstock.network.fabric.views.numbers import NONE, seconds, shorten
from penstock.network.fabric.views.wording import TIMES, columns, facts, notes, title, warnings
from penstock.report.text import print_unbroken, table, table_width


def show(run: Run, results: dict[str, Any], console: Console) -> None:
    """Print all of a run's figures. A table that does not fit the console's width is split in two.

    A run without a complete trial has no table.
    """
    show_head(run, results, console)
    console.print()
    if results["trials"]:
        _print_tables(results, console)
        console.print()
    for name, text in facts(run, results):
        console.print(Text(f"{name:<10}{text}"), soft_wrap=True)
    for note in notes(run, results) if results["trials"] else ():
        console.print(Text(note, "dim"))


def show_head(run: Run, results: dict[str, Any], console: Console) -> None:
    """Print what was run, and reasons why its figures may not be what they seem."""
    console.print(Text(title(run), "bold"), soft_wrap=True)
    for line in warnings(run, results):
        console.print(Text(f"warning: {line}", "bold yellow"), soft_wrap=True)


def _print_tables(results: dict[str, Any], console: Console) -> None:
    """Print one table; if it does not fit, two, of times and of rates, in which long names are cut."""
    full_table = _table(results, tuple(TIMES), rates=True)
    if table_width(full_table, console) <= console.width:
        print_unbroken(console, full_table)
        return
    longest = max(len(group["name"]) for group in results["groups"])
    times = tuple(TIMES)
    if table_width(_table(results, times, rates=False), console) > console.width:
        times = times[1:]  # without the least
    for part in (times, ()):
        part_table = _table(results, part, rates=not part)
        if (excess := table_width(part_table, console) - console.width) > 0:
            part_table = _table(results, part, rates=not part, name_width=max(longest - excess, 12))
        print_unbroken(console, part_table)
        if part:
            console.print()


def _table(results: dict[str, Any], times: Sequence[str], *, rates: bool, name_width: int = 1000) -> Table:
    """Return a table with one row for each group of similar transfers, and one for the step.

    `times` are the names from `TIMES` to show, followed by the mean; no mean is shown without them.
    """
    heads, *lines, step = columns(results, times, rates=rates)
    result = table(*heads, left=heads.index("bytes"))
    for name, *cells in lines:
        result.add_row(*map(Text, [shorten(name, name_width), *cells]))
    result.add_row()
    result.add_row(*map(Text, step), style="bold")
    return result


# -- two runs ---------------------------------------------------------------------------------------------------------


def show_comparison(
    comparison: dict[str, Any], console: Console, names: Sequence[str], warned: Sequence[Sequence[str]]
) -> None:
    """Print two runs side by side, with their names and their reports' warnings, and which of their differences are
    more than chance."""
    for letter, name in zip("AB", names, strict=False):
        console.print(Text(f"{letter}: {name}", "bold"), soft_wrap=True)
    for letter, lines in zip("AB", warned, strict=False):
        for line in lines:
            console.print(Text(f"warning: {letter}: {line}", "bold yellow"), soft_wrap=True)
    for setting, (a, b) in comparison["other_settings"].items():
        console.print(Text(f"{setting}: {a} in A, {b} in B"), soft_wrap=True)
    console.print()
    rows = [row for row in (*comparison["transfers"], comparison["step"]) if row]
    full = _comparison_table(rows, tails=True)
    print_unbroken(
        console, full if table_width(full, console) <= console.width else _comparison_table(rows, tails=False)
    )
    console.print()
    for letter, only in (("A", comparison["only_in_a"]), ("B", comparison["only_in_b"])):
        if only:
            console.print(Text(f"only in {letter}: {', '.join(only)}"), soft_wrap=True)
    verdict = "No difference shown: what differs may be chance."
    if comparison["differs"]:
        verdict = "The runs differ."
    elif all(row["verdict"] == "too few samples" for row in rows):
        verdict = f"Too few samples to tell: each run needs {MIN_SAMPLES} trials or more."
    console.print(Text(verdict, "bold"))
    console.print(Text(COMPARISON_NOTE, "dim"))


COMPARISON_NOTE = (
    "B/A: how many times as long B takes, with its 95% interval. Differs: a test of the medians (Mann-Whitney), of the "
    "distributions' shape (Kolmogorov-Smirnov) or of the tails (Fisher) is below 5%, corrected for all of them (Holm)."
)


def _comparison_table(rows: Sequence[dict[str, Any]], *, tails: bool) -> Table:
    further = ["p99 A", "p99 B"] if tails else []
    result = table("transfer", *(["bytes"] if tails else []), "p50 A", "p50 B", "B/A", "", *further, "verdict")
    for column in result.columns:
        column.justify = "left" if column.header in ("transfer", "", "verdict") else "right"
    for row in rows:
        low_high = row["ratio_interval"]
        interval = f"{low_high[0]:.3f} to {low_high[1]:.3f}" if low_high else ""
        ratio = NONE if row["ratio"] is None else f"{row['ratio']:.3f}"
        cells = [row["name"] if tails else shorten(row["name"], 20), *([f"{row['bytes']:,}"] if tails else [])]
        cells += [*map(seconds, row["p50_s"]), ratio, interval, *(map(seconds, row["p99_s"]) if tails else [])]
        differs = ", ".join(row["differs_in"])
        verdict = f"differs: {differs}" if differs else row["verdict"]
        result.add_row(*map(Text, [*cells, verdict]), style="bold" if differs else "")
    return result

"""A simulated schedule as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock._base.words import sized
from penstock.costs import Outcome
from penstock.report.text import print_unbroken, table
from penstock.simulate import Cause
from penstock.simulate.figures import WORK, chunks, title

Written = Callable[[float], str]
"""Writes numbers of one table alike."""

HEADS = {
    Cause.WARM_UP: "warm\nup",
    Cause.FORWARD: "for\nward",
    Cause.BACKWARD: "back\nward",
    Cause.LINK: "link",
    Cause.OTHER: "other",
    Cause.COOL_DOWN: "cool\ndown",
}
"""Headings for the idle-time columns, kept narrow; `IDLE_NOTE` below the table explains them."""

IDLE_NOTE = (
    "Idle by cause: warm-up, before a rank's first action; forward and backward, until another rank has made what it "
    "waits for; link, until that has arrived; cool-down, after its last action."
)
PEAK_NOTE = "Peak: the most activations that a rank holds at once; 1 is one microbatch on all its stages."
MEMORY_NOTE = "Memory counts neither the batch nor what an action takes while it runs; penstock plan does."


def show(outcome: Outcome, console: Console, more: Mapping[str, str] | None = None) -> None:
    """Prints a schedule's figures, `more` of them by name, and a table of its ranks."""
    timeline = outcome.timeline
    busy = (timeline.busy_seconds(rank) for rank in range(outcome.schedule.ranks))
    idle = (time for by_cause in outcome.idle for time in by_cause.values())
    times = format_of([timeline.makespan_seconds, *busy, *idle])
    console.print(Text(title(outcome.schedule), "bold"), end="\n\n")
    for name, value in (("makespan", timeline.makespan_seconds), ("span", timeline.span_seconds)):
        unit = " s" if outcome.costs.are_measured else ""
        console.print(f"{name:<15}{times(value):>{len(times(timeline.makespan_seconds))}}{unit}")
    console.print(f"{'bubble rate':<15}{timeline.bubble_rate:.2%} of the span")
    console.print(f"{'critical path':<15}{_path(outcome)}")
    assumed = {"assumed": outcome.costs.assumption} if outcome.costs.assumed else {}
    each = chunks(outcome.schedule)
    if each > 1 and outcome.costs.are_alike:
        assumed["costs"] = f"per stage; a rank has {each} stages"
    if origin := outcome.costs.origin(outcome.schedule.placement):
        assumed["costs"] = origin
    for name, text in {**assumed, **(more or {})}.items():
        console.print(f"{name:<15}{text}")
    console.print()
    print_unbroken(console, _ranks(outcome, times))
    if outcome.costs.has_memory:
        console.print()
        print_unbroken(console, _memory(outcome))
    kept = f"\n{MEMORY_NOTE}" if outcome.costs.has_memory else ""
    console.print(f"\n{IDLE_NOTE}\n{PEAK_NOTE}{kept}", style="dim")


_LEAST, _MAX = 1e-12, 1e18
"""Numbers whose largest is between these are written without an exponent."""


def format_of(values: Sequence[float], most: int | None = None) -> Written:
    """The format for some numbers: with as many decimals as they need, at most `most`.

    `most` defaults to five significant digits of the largest. If that would give a row of zeros, each number gets five
    digits and an exponent.
    """
    largest = max(map(abs, values), default=0.0)
    if largest and not _LEAST <= largest < _MAX:
        return lambda value: f"{value:.5g}"
    if most is None:
        most = max(0, 4 - math.floor(math.log10(largest))) if largest else 0
    slack = largest * 1e-9
    decimals = next((d for d in range(most) if all(abs(round(value, d) - value) <= slack for value in values)), most)
    return lambda value: f"{value:,.{decimals}f}"


def shown_causes(outcomes: Sequence[Outcome]) -> list[Cause]:
    """The causes for which some rank idles."""
    return [cause for cause in Cause if any(by_cause[cause] for one in outcomes for by_cause in one.idle)]


def _ranks(outcome: Outcome, times: Written) -> Table:
    causes = shown_causes([outcome])
    made = table("rank", "busy", *(HEADS[cause] for cause in causes), "peak")
    peaks = format_of(outcome.peak_activations, most=2)
    for rank, by_cause in enumerate(outcome.idle):
        idle_times = (times(by_cause[cause]) for cause in causes)
        busy = times(outcome.timeline.busy_seconds(rank))
        made.add_row(str(rank), busy, *idle_times, peaks(outcome.peak_activations[rank]))
    return made


def _memory(outcome: Outcome) -> Table:
    lines = outcome.memory_by_kind
    plain = format_of([size for line in lines for size in line.values()])
    sizes = sized if outcome.costs.are_measured else plain
    made = table("memory of rank", *lines[0])
    for rank, line in enumerate(lines):
        made.add_row(str(rank), *map(sizes, line.values()))
    return made


def _path(outcome: Outcome) -> str:
    path = outcome.path
    makespan = outcome.timeline.makespan_seconds
    if not makespan:
        return "nothing takes any time"
    parts = {op.value: path.seconds(op) for op in WORK} | {"links": path.link_seconds}
    shares = ", ".join(f"{name} {time / makespan:.1%}" for name, time in parts.items() if time)
    return f"{len(path.spans):,} actions: {shares}"

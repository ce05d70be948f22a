"""A simulated schedule as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from penstock._base.words import sized
from penstock.costs import Outcome
from penstock.report.text import print_columns
from penstock.simulate import Cause
from penstock.simulate.figures import WORK, chunks, title

HEADS = {
    Cause.WARM_UP: "warm\nup",
    Cause.FORWARD: "wait\nF",
    Cause.BACKWARD: "wait\nB",
    Cause.LINK: "link",
    Cause.OTHER: "other",
    Cause.COOL_DOWN: "cool\ndown",
}
"""Headings for the idle-time columns, kept narrow; `IDLE_NOTE` below the table explains them."""

IDLE_NOTE = (
    "Idle by cause: warm-up, before a rank's first action; wait F and wait B, until another rank has computed its "
    "input; link, until that has arrived; cool-down, after its last action."
)
PEAK_NOTE = "Peak act.: peak activations of a rank; 1 is one microbatch on all its stages."
MEMORY_NOTE = "Memory excludes the batch and workspace; penstock plan includes them."


def show(outcome: Outcome, console: Console, more: Mapping[str, str] | None = None) -> None:
    """Prints a schedule's figures, `more` of them by name, and a table of its ranks."""
    timeline, costs = outcome.timeline, outcome.costs
    ranks = range(outcome.schedule.ranks)
    busy = [timeline.busy_seconds(rank) for rank in ranks]
    times = format_of([timeline.makespan_seconds, *busy, *(time for one in outcome.idle for time in one.values())])
    unit, width = " s" if costs.are_measured else "", len(times(timeline.makespan_seconds))
    lines = {
        "makespan": f"{times(timeline.makespan_seconds)}{unit}",
        "span": f"{times(timeline.span_seconds):>{width}}{unit}",
        "bubble rate": f"{timeline.bubble_rate:.2%} of the span",
        "critical path": _path(outcome),
        "assumed": costs.assumption,
        "costs": costs_of_stages(outcome),
    }
    console.print(Text(title(outcome.schedule), "bold"), end="\n\n")
    for name, text in {**lines, **(more or {})}.items():
        if text:
            console.print(f"{name:<15}{text}")
    console.print()
    idle = {HEADS[cause]: [times(one[cause]) for one in outcome.idle] for cause in shown_causes([outcome])}
    peaks = texts(outcome.peak_activations, most=2)
    print_columns(console, {"rank": ranks, "busy": map(times, busy), **idle, "peak\nact.": peaks})
    if costs.has_memory:
        held = outcome.memory_by_kind
        sizes = sized if costs.are_measured else format_of([size for one in held for size in one.values()])
        console.print()
        kinds = {kind: [sizes(one[kind]) for one in held] for kind in held[0]}
        print_columns(console, {"memory of rank": ranks, **kinds})
    memory = f"\n{MEMORY_NOTE}" if costs.has_memory else ""
    console.print(f"\n{IDLE_NOTE}\n{PEAK_NOTE}{memory}", style="dim")


def costs_of_stages(outcome: Outcome) -> str:
    """Where measured costs come from; of given ones, that they are per stage where a rank has several."""
    each = chunks(outcome.schedule)
    several = f"per stage; a rank has {each} stages" if each > 1 and outcome.costs.are_alike else ""
    return outcome.costs.origin(outcome.schedule.placement) or several


def _path(outcome: Outcome) -> str:
    path, makespan = outcome.path, outcome.timeline.makespan_seconds
    if not makespan:
        return "nothing takes any time"
    parts = {op.value: path.seconds(op) for op in WORK} | {"links": path.link_seconds}
    shares = ", ".join(f"{name} {time / makespan:.1%}" for name, time in parts.items() if time)
    return f"{len(path.spans):,} actions: {shares}"


_LEAST, _MAX = 1e-12, 1e18
"""Numbers whose largest is between these are written without an exponent."""


def format_of(values: Sequence[float], most: int | None = None) -> Callable[[float], str]:
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


def texts(values: Sequence[float], most: int | None = None) -> list[str]:
    """Some numbers, each as `format_of` them all writes it."""
    return [*map(format_of(values, most), values)]


def shown_causes(outcomes: Sequence[Outcome]) -> list[Cause]:
    """The causes for which some rank idles."""
    return [cause for cause in Cause if any(by_cause[cause] for one in outcomes for by_cause in one.idle)]

"""Tables of a simulated schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from penstock._base.formatting import format_bytes
from penstock.costs import Outcome
from penstock.report.text import format_all, make_format, print_columns
from penstock.simulate import IdleCause
from penstock.simulate.figures import WORK, chunks, title

HEADS = {
    IdleCause.WARM_UP: "warm\nup",
    IdleCause.FORWARD: "wait\nF",
    IdleCause.BACKWARD: "wait\nB",
    IdleCause.LINK: "link",
    IdleCause.OTHER: "other",
    IdleCause.COOL_DOWN: "cool\ndown",
}
"""Narrow headings of the idle-time columns; `IDLE_NOTE` below the table explains them."""

IDLE_NOTE = (
    "Idle by cause: warm-up, before a rank's first action; wait F and wait B, until another rank has computed its "
    "input; link, until that has arrived; cool-down, after its last action."
)
PEAK_NOTE = "Peak act.: peak activations of a rank; 1 is one microbatch on all its stages."
MEMORY_NOTE = "Memory excludes the batch and workspace; penstock plan includes them."


def show(outcome: Outcome, console: Console, extra: Mapping[str, str] | None = None) -> None:
    """Print the metrics of a schedule, `extra` ones by name, and a table of its ranks."""
    timeline, costs = outcome.timeline, outcome.costs
    ranks = range(outcome.schedule.ranks)
    busy = [timeline.busy_seconds(rank) for rank in ranks]
    times = make_format(
        [timeline.makespan_seconds, *busy, *(time for causes in outcome.idle for time in causes.values())]
    )
    unit, width = " s" if costs.are_measured else "", len(times(timeline.makespan_seconds))
    lines = {
        "makespan": f"{times(timeline.makespan_seconds)}{unit}",
        "span": f"{times(timeline.span_seconds):>{width}}{unit}",
        "bubble rate": f"{timeline.bubble_rate:.2%} of the span",
        "critical path": _path(outcome),
        "assumed": costs.assumption,
        "costs": costs_of_stages(outcome),
    }
    console.print(title(outcome.schedule), style="bold", end="\n\n")
    for name, text in {**lines, **(extra or {})}.items():
        if text:
            console.print(f"{name:<15}{text}")
    console.print()
    idle = {HEADS[cause]: [times(causes[cause]) for causes in outcome.idle] for cause in shown_causes([outcome])}
    peaks = format_all(outcome.peak_activations, max_decimals=2)
    print_columns(console, {"rank": ranks, "busy": map(times, busy), **idle, "peak\nact.": peaks})
    if costs.has_memory:
        memory = outcome.memory_by_kind
        sizes = (
            format_bytes if costs.are_measured else make_format([size for kinds in memory for size in kinds.values()])
        )
        console.print()
        columns = {kind: [sizes(kinds[kind]) for kinds in memory] for kind in memory[0]}
        print_columns(console, {"memory of rank": ranks, **columns})
    memory_note = f"\n{MEMORY_NOTE}" if costs.has_memory else ""
    console.print(f"\n{IDLE_NOTE}\n{PEAK_NOTE}{memory_note}", style="dim")


def costs_of_stages(outcome: Outcome) -> str:
    """Describe the origin of measured costs; note that other ones are per stage if ranks have several."""
    count = chunks(outcome.schedule)
    per_stage = f"per stage; a rank has {count} stages" if count > 1 and outcome.costs.are_alike else ""
    return outcome.costs.origin(outcome.schedule.placement) or per_stage


def _path(outcome: Outcome) -> str:
    path, makespan = outcome.path, outcome.timeline.makespan_seconds
    if not makespan:
        return "all costs are 0"
    parts = {op.value: path.seconds(op) for op in WORK} | {"links": path.link_seconds}
    shares = ", ".join(f"{name} {time / makespan:.1%}" for name, time in parts.items() if time)
    return f"{len(path.spans):,} actions: {shares}"


def shown_causes(outcomes: Sequence[Outcome]) -> list[IdleCause]:
    """Return the causes for which some rank idles."""
    return [cause for cause in IdleCause if any(causes[cause] for outcome in outcomes for causes in outcome.idle)]

"""The result of simulating a schedule, for JSON and as tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli._costs import Costs
from penstock.errors import ArgumentError
from penstock.report.text import print_unbroken, table
from penstock.schedule import Op, Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import Cause, memory
from penstock.simulate.columns import Columns
from penstock.simulate.costs import OfStage, each_of
from penstock.simulate.figures import WORK, Figures, chunks, title
from penstock.simulate.simulator import timed
from penstock.words import sized

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


@dataclass(frozen=True)
class Outcome:
    """A simulated schedule. Numbers are in the units of the costs."""

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    columns: Columns | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> Outcome:
        """Simulates a schedule. Raises ArgumentError if the costs do not fit its stages and links."""
        by_stage = costs.of(schedule)
        if any(cost.unsharded_bytes for stage in by_stage for cost in each_of(stage)) and not _gathers(schedule):
            raise ArgumentError(
                f"schedule {schedule.name!r} has no UNSHARD, so nothing says when whole parameters take memory; give "
                "--unshard-window, which adds them"
            )
        return cls(schedule, costs, *timed(schedule, by_stage, costs.links, contended=costs.contended))

    @cached_property
    def by_stage(self) -> list[OfStage]:
        return self.costs.of(self.schedule)

    @property
    def memory_by_kind(self) -> list[dict[str, float]]:
        """For each rank, the most that it needs of each kind, and at once."""
        sharded = _gathers(self.schedule)
        return [
            {
                "parameters": held.parameters,
                "gradients": held.gradients,
                "optimizer": held.optimizer,
                "activations": held.activations,
                **({"unsharded": held.unsharded} if sharded else {}),
                "peak": held.at_once,
            }
            for held in self.figures.peaks
        ]

    @property
    def memory_curves(self) -> list[dict[str, list[tuple[float, float]]]]:
        """Each rank's memory by kind over time, for a trace; none if sizes were not given."""
        if not self.costs.has_memory:
            return []
        found = []
        for held in memory(self.schedule, self.by_stage, self.timeline):
            constant = held.parameters + held.gradients + held.optimizer
            curves = {"parameters, gradients, optimizer": [(0.0, constant)]} if constant else {}
            curves["activations"] = [(0.0, 0.0), *zip(held.seconds, held.activations, strict=True)]
            if held.peak_unsharded:
                curves["gathered parameters"] = [(0.0, 0.0), *zip(held.seconds, held.unsharded, strict=True)]
            found.append(curves)
        return found

    @cached_property
    def figures(self) -> Figures:
        return Figures(self.schedule, self.by_stage, self.timeline, self.columns)

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        found = self.figures.to_dict()
        if self.costs.are_measured:
            found["costs"] = self.costs.origin(self.schedule.placement)
            found["cuts"] = list(self.costs.cuts(self.schedule.placement))
        if self.costs.assumed:
            found["assumed"] = dict(self.costs.assumed)
        if self.costs.has_memory:
            found["memory"] = self.memory_by_kind
        return found


def _gathers(schedule: Schedule) -> bool:
    """Whether the schedule gathers the parameters of sharded stages."""
    return any(code == Op.UNSHARD.code for row in schedule.rows for _, code in row.kinds)


# -- tables -----------------------------------------------------------------------------------------------------------


def show(outcome: Outcome, console: Console, more: Mapping[str, str] | None = None) -> None:
    """Prints a schedule's figures, `more` of them by name, and a table of its ranks."""
    timeline = outcome.timeline
    times = format_of([timeline.makespan_seconds, *_times(outcome)])
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
    console.print(f"\n{IDLE_NOTE}\n{PEAK_NOTE}", style="dim")


def _times(outcome: Outcome) -> list[float]:
    """All times in the table of ranks."""
    busy = [outcome.timeline.busy_seconds(rank) for rank in range(outcome.schedule.ranks)]
    return [*busy, *(time for by_cause in outcome.figures.idle for time in by_cause.values())]


_LEAST, _MAX = 1e-12, 1e18
"""Numbers whose largest is between these are written without an exponent."""


def format_of(values: Sequence[float], most: int | None = None) -> Number:
    """The format for some numbers: with as many decimals as they need, at most `most`.

    `most` defaults to five significant digits of the largest. If that would give a row of zeros, each number gets five
    digits and an exponent.
    """
    largest = max(map(abs, values), default=0.0)
    if largest and not _LEAST <= largest < _MAX:
        return Number(None)
    if most is None:
        most = max(0, 4 - math.floor(math.log10(largest))) if largest else 0
    slack = largest * 1e-9
    decimals = next((d for d in range(most) if all(abs(round(value, d) - value) <= slack for value in values)), most)
    return Number(decimals)


@dataclass(frozen=True, slots=True)
class Number:
    """Writes numbers with a fixed number of decimals, or, if that is None, with an exponent."""

    decimals: int | None

    def __call__(self, value: float) -> str:
        return f"{value:.5g}" if self.decimals is None else f"{value:,.{self.decimals}f}"


def shown_causes(outcomes: Sequence[Outcome]) -> list[Cause]:
    """The causes for which some rank idles."""
    return [cause for cause in Cause if any(by_cause[cause] for one in outcomes for by_cause in one.figures.idle)]


def _ranks(outcome: Outcome, times: Number) -> Table:
    causes = shown_causes([outcome])
    made = table("rank", "busy", *(HEADS[cause] for cause in causes), "peak")
    peaks = format_of(outcome.figures.peak_activations, most=2)
    for rank, by_cause in enumerate(outcome.figures.idle):
        idle_times = (times(by_cause[cause]) for cause in causes)
        busy = times(outcome.timeline.busy_seconds(rank))
        made.add_row(str(rank), busy, *idle_times, peaks(outcome.figures.peak_activations[rank]))
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
    path = outcome.figures.path
    makespan = outcome.timeline.makespan_seconds
    if not makespan:
        return "nothing takes any time"
    parts = {op.value: path.seconds(op) for op in WORK} | {"links": path.link_seconds}
    shares = ", ".join(f"{name} {time / makespan:.1%}" for name, time in parts.items() if time)
    return f"{len(path.spans):,} actions: {shares}"

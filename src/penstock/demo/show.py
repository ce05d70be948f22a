"""The demo's output. Each metric is explained in a few words, and everything fits into 80 columns."""

from __future__ import annotations

import math
import resource
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rich.console import Console
from rich.markup import escape

from penstock._base.process import cores
from penstock.demo.model import VOCABULARY
from penstock.demo.settings import Settings
from penstock.schedule import Op, Schedule, schedule_specs
from penstock.schedule.timeline import Timeline
from penstock.simulate import simulate
from penstock.simulate.costs import StageCost
from penstock.trace.runs.folder import STEPS

TIMELINE = "timeline.json"
WIDTH = 80


@dataclass(frozen=True, slots=True)
class Bubble:
    """The share of the time in which ranks wait, determined three ways.

    Attributes:
        measured: the median over the timed steps.
        simulated: for the same schedule, with each stage's measured times and messages that take no time.
        textbook: for the same schedule, if all stages took the same time.
        formula: the textbook's, in p ranks and m microbatches; empty if the schedule has none.
    """

    measured: float
    simulated: float
    textbook: float
    formula: str


def compare(schedule: Schedule, timelines: Sequence[Timeline]) -> Bubble:
    """Compare the bubble of a few timed steps with its predictions."""
    formulas = {generator.name: generator.bubble or "" for generator in schedule_specs()}
    return Bubble(
        median(timeline.bubble_rate for timeline in timelines),
        simulate(schedule, stage_costs(schedule, timelines)).bubble_rate,
        simulate(schedule, StageCost(1.0, 1.0, 1.0)).bubble_rate,
        formulas.get(schedule.name, ""),
    )


def stage_costs(schedule: Schedule, timelines: Sequence[Timeline]) -> list[StageCost]:
    """Return the mean time of each stage's forward and backward, in seconds."""
    seconds: dict[tuple[int, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline:
            seconds.setdefault((span.action.stage, span.action.op), []).append(span.end_seconds - span.start_seconds)

    def mean(stage: int, *ops: Op) -> float:
        return sum(fmean(seconds[stage, op]) for op in ops if (stage, op) in seconds)

    # A full backward is counted as I: the simulated time of B is the sum of I and W.
    return [
        StageCost(mean(stage, Op.F), mean(stage, Op.B, Op.I), mean(stage, Op.W)) for stage in range(schedule.stages)
    ]


def heading(console: Console, number: str, text: str) -> None:
    """Print the title of one of the three parts."""
    console.print(f"\n[bold]{number}. {text}[/bold]")


def paragraph(console: Console, text: str) -> None:
    """Print text below a heading."""
    console.print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  "), soft_wrap=True, markup=False)


def result(
    console: Console,
    settings: Settings,
    held_out: tuple[float, float],
    tokens_per_second: float,
    bubble: Bubble,
    memory_bytes: Sequence[int],
) -> None:
    """Print the result: how well the model learned, where the time went, and where to look next.

    Args:
        console: where to print.
        settings: the demo's options.
        held_out: the loss on held-out text before and after training, in nats per byte.
        tokens_per_second: the median over the training steps.
        bubble: the bubble, measured and predicted.
        memory_bytes: each process's peak memory.
    """
    before, after = held_out
    guess = f"{math.log(VOCABULARY):.2f}"
    formula = f": {bubble.formula}" if bubble.formula else ""
    memory = ", ".join(f"{peak / 1e6:.0f}" for peak in memory_bytes)
    lines = [
        ("loss", f"[bold]{before:.2f} -> {after:.2f}[/bold] nats per byte, on files that it was never trained on"),
        ("", f"({guess} is guessing, 0 is knowing the text by heart)"),
        ("bubble", f"[bold]{bubble.measured:.1%}[/bold] measured: the share of the time in which ranks wait"),
        ("", f"{bubble.simulated:.1%} simulated, from the time that each stage takes here"),
        ("", f"{bubble.textbook:.1%} by the textbook, if stages were alike{formula}"),
        ("speed", f"{tokens_per_second:,.0f} bytes (tokens) per second"),
        ("memory", f"{memory} MB: the peak of each rank's process, with PyTorch"),
        ("trace", f"{escape(str(settings.out / TIMELINE))}: actions by rank; open it in ui.perfetto.dev"),
        ("log", f"{escape(str(settings.out / STEPS))}: one line per step"),
        ("run", f"penstock report {escape(str(settings.out))} draws all of it on a page"),
    ]
    if settings.ranks > cores():
        warning = f"({settings.ranks} processes take turns on {cores()} cores: bubble and speed mean little here)"
        lines.insert(5, ("", warning))
    for label, text in lines:
        console.print(f"  {label:<8}{text}", soft_wrap=True)


def peak_memory_bytes() -> int:
    """Return this process's peak memory, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

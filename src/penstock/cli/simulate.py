"""`penstock simulate`: given costs, how long a schedule takes, where its time goes and how much memory it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.cli._cost_options import EPILOG as FILE_EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import Json, output_option, spread
from penstock.cli._order import OrderOptions
from penstock.cli._outcome import HEADS, IDLE_NOTE, PEAK_NOTE, format_of, show, shown_causes
from penstock.cli._sweep import show_sweep, sweep, sweep_to_dict
from penstock.costs import Costs, Outcome, with_one_model
from penstock.report import write_perfetto
from penstock.report.text import pairs, print_unbroken, table
from penstock.simulate.figures import chunks

EPILOG = f"""\
Costs are for one microbatch on one stage. With --schedule all they are for one rank instead, divided evenly among its \
chunks (messages keep their size); costs from a file are added up over neighboring stages for a schedule that has \
fewer. So every schedule trains the same model. With several numbers of ranks they are for the whole model.

{FILE_EPILOG}"""
"""Printed below the options."""

_OF_RANKS = "for one microbatch on one rank, divided evenly among its chunks"
_OF_STAGES = "for each of the model's stages, from the file; for a schedule with fewer, neighbors are added up"


@spread
def simulate(
    order: OrderOptions,
    costs: CostOptions,
    perfetto: Annotated[
        Path | None,
        output_option("Write the timeline for ui.perfetto.dev; one cost unit becomes one second.", metavar="FILE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a schedule without running it: makespan, bubbles by cause, and memory.

    With --schedule all, or several names with commas between them, prints one row per schedule, shortest span first.
    With several numbers of --ranks or --microbatches (1,2,4,8), prints how much faster than one device each is.
    """
    known = costs.read(order.count, order.ranks)
    if perfetto is not None and (order.is_many or order.sweeps):
        several = "pass --schedule one name" if order.is_many else "pass one number of ranks and microbatches"
        raise ArgumentError(f"--perfetto: a trace shows one schedule; {several}")
    if order.sweeps:
        swept = sweep(order, known)
        if as_json:
            print(json.dumps(sweep_to_dict(*swept)))
        else:
            show_sweep(*swept, known, Console(highlight=False))
        return
    if order.is_many:
        compare(order, known, as_json=as_json)
        return
    outcome = Outcome.simulated(order.one(), known)
    if perfetto is not None:
        unit = "bytes" if outcome.costs.are_measured else ""
        write_perfetto(outcome.timeline, perfetto, memory=outcome.memory_curves, unit=unit)
    if as_json:
        print(json.dumps(outcome.to_dict()))
    else:
        show(outcome, Console(highlight=False))


def compare(order: OrderOptions, costs: Costs, *, as_json: bool) -> None:
    """Prints every schedule that the options allow, shortest span first."""
    found, refused = with_one_model(costs, *order.all())
    reasons = {name: reason for (name, *_), reason in refused.items()}
    outcomes = sorted(
        found.values(), key=lambda one: (one.timeline.span_seconds, one.timeline.makespan_seconds, one.schedule.name)
    )
    if as_json:
        others = [{"name": name, "reason": reason} for name, reason in reasons.items()]
        print(json.dumps({"schedules": [one.to_dict() for one in outcomes], "not_allowed": others}))
    else:
        show_all(outcomes, reasons, Console(highlight=False))


def show_all(outcomes: Sequence[Outcome], reasons: Mapping[str, str], console: Console) -> None:
    """Prints a row per schedule, and below them the schedules that the numbers do not allow, with the reasons."""
    schedule = outcomes[0].schedule
    numbers = f"p = {counted(schedule.ranks, 'rank')}, m = {counted(schedule.microbatches, 'microbatch')}"
    console.print(f"[bold]{numbers}; the shortest span first[/]")
    if assumption := outcomes[0].costs.assumption:
        console.print(f"assumed: {assumption}")
    known = outcomes[0].costs
    console.print(f"costs: {known.described(_OF_RANKS, _OF_STAGES)}")
    console.print()
    causes = shown_causes(outcomes)
    made = table("schedule", "v", "makespan", "span", "bubble", "peak", *(HEADS[cause] for cause in causes))
    makespans = format_of([one.timeline.makespan_seconds for one in outcomes])
    spans = format_of([one.timeline.span_seconds for one in outcomes])
    peaks = format_of([max(one.peak_activations) for one in outcomes], most=2)
    for one in outcomes:
        available = one.timeline.makespan_seconds * one.schedule.ranks
        idle = (sum(by_cause[cause] for by_cause in one.idle) for cause in causes)
        made.add_row(
            one.schedule.name,
            str(chunks(one.schedule)),
            makespans(one.timeline.makespan_seconds),
            spans(one.timeline.span_seconds),
            f"{one.timeline.bubble_rate:.1%}",
            peaks(max(one.peak_activations)),
            *(f"{100 * time / available:.1f}" if time else "-" for time in idle),
        )
    print_unbroken(console, made)
    if reasons:
        console.print("\n[bold]Not possible with these numbers[/]")
        console.print(pairs(reasons.items()))
    console.print(
        f"\nv: chunks (stages) a rank. Bubble: the share of the span in which ranks do not compute.\n"
        f"{PEAK_NOTE}\n{IDLE_NOTE} Here in percent of the makespan, on average over the ranks.",
        style="dim",
    )

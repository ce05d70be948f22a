"""`penstock simulate`: given costs, how long a schedule takes, where its time goes and how much memory it needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.cli._cost_options import EPILOG as FILE_EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import JSON, output_option, print_json, screen
from penstock.cli._order import Asked, OrderOptions
from penstock.cli._outcome import HEADS, IDLE_NOTE, PEAK_NOTE, show, shown_causes, texts
from penstock.costs import Costs, Outcome, with_one_model
from penstock.report import write_perfetto
from penstock.report.text import pairs, print_columns
from penstock.schedule import generate
from penstock.simulate import NO_COST
from penstock.simulate import simulate as timeline_of
from penstock.simulate.figures import chunks

EPILOG = f"""\
Costs are per microbatch and stage. With --schedule all they are per rank instead, divided evenly among its stages \
(messages keep their size); costs from a file are summed over neighboring stages for a schedule with fewer. So every \
schedule trains the same model. With several numbers of ranks they are for the whole model.

{FILE_EPILOG}"""
"""Epilog of the help."""

_OF_FILE = "per stage of the model, from the file; "
_OF_ONE_SIZE = (
    "per microbatch and rank, divided evenly among its stages",
    f"{_OF_FILE}with fewer stages, neighbors are summed",
)
_OF_SEVERAL_SIZES = (
    "per microbatch on the whole model, divided evenly among its stages",
    f"{_OF_FILE}with fewer stages, neighbors are summed",
)
"""What costs are of: numbers, and those in a file."""


def simulate(
    order: OrderOptions,
    costs: CostOptions,
    perfetto: Path | None = output_option(
        "Write the timeline for ui.perfetto.dev; one cost unit becomes one second.", metavar="FILE"
    ),
    as_json: bool = JSON,
) -> None:
    """Time a schedule without running it: makespan, bubbles by cause, and memory.

    With --schedule all, or several comma-separated names, print one row per schedule, shortest span first.
    With several numbers of --ranks or --microbatches (1,2,4,8), print the speedup of each over one device.
    """
    known = costs.read(order.count, order.ranks)
    if perfetto is not None and (order.is_many or order.sweeps):
        several = "pass --schedule one name" if order.is_many else "pass one number of ranks and microbatches"
        raise ArgumentError(f"--perfetto: a trace shows one schedule; {several}")
    if order.sweeps:
        _sweep(order, known, as_json=as_json)
    elif order.is_many:
        _compare(order, known, as_json=as_json)
    else:
        outcome = Outcome.simulated(order.one(), known)
        if perfetto is not None:
            unit = "bytes" if known.are_measured else ""
            write_perfetto(outcome.timeline, perfetto, memory=outcome.memory_curves, unit=unit)
        if as_json:
            print_json(outcome.to_dict())
        else:
            show(outcome, screen())


def _show_costs(costs: Costs, of: tuple[str, str], console: Console) -> None:
    if costs.assumed:
        console.print(f"assumed: {costs.assumption}")
    console.print(f"costs: {costs.described(*of)}")


# -- several schedules ------------------------------------------------------------------------------------------------


def _compare(order: OrderOptions, costs: Costs, *, as_json: bool) -> None:
    """Prints every schedule that the options allow, shortest span first."""
    found, refused = with_one_model(costs, *order.all())
    reasons = {name: reason for (name, *_), reason in refused.items()}
    outcomes = sorted(
        found.values(), key=lambda one: (one.timeline.span_seconds, one.timeline.makespan_seconds, one.schedule.name)
    )
    if as_json:
        others = [{"name": name, "reason": reason} for name, reason in reasons.items()]
        print_json({"schedules": [one.to_dict() for one in outcomes], "not_allowed": others})
    else:
        _show_all(outcomes, reasons, screen())


def _show_all(outcomes: Sequence[Outcome], reasons: Mapping[str, str], console: Console) -> None:
    """Prints a row per schedule, and below them the schedules that the numbers do not allow, with the reasons."""
    schedule = outcomes[0].schedule
    numbers = f"p = {counted(schedule.ranks, 'rank')}, m = {counted(schedule.microbatches, 'microbatch')}"
    console.print(f"[bold]{numbers}; the shortest span first[/]")
    _show_costs(outcomes[0].costs, _OF_ONE_SIZE, console)
    console.print()
    columns: dict[str, Sequence[object]] = {
        "schedule": [one.schedule.name for one in outcomes],
        "vpp": [chunks(one.schedule) for one in outcomes],
        "makespan": texts([one.timeline.makespan_seconds for one in outcomes]),
        "span": texts([one.timeline.span_seconds for one in outcomes]),
        "bubble": [f"{one.timeline.bubble_rate:.1%}" for one in outcomes],
        "peak\nact.": texts([max(one.peak_activations) for one in outcomes], most=2),
    }
    for cause in shown_causes(outcomes):
        idle = [(sum(by_cause[cause] for by_cause in one.idle), one.timeline.makespan_seconds) for one in outcomes]
        columns[HEADS[cause]] = [f"{100 * t / (whole * schedule.ranks):.1f}" if t else "-" for t, whole in idle]
    print_columns(console, columns)
    if reasons:
        console.print("\n[bold]Not possible with these numbers[/]")
        console.print(pairs(reasons.items()))
    console.print(
        f"\nvpp: stages per rank. Bubble: idle share of the span.\n"
        f"{PEAK_NOTE}\n{IDLE_NOTE} In % of the makespan, averaged over ranks.",
        style="dim",
    )


# -- several numbers of ranks or microbatches -------------------------------------------------------------------------


def _sweep(order: OrderOptions, costs: Costs, *, as_json: bool) -> None:
    """Prints how much faster than one device each schedule is, by ranks and microbatches."""
    outcomes, refused = with_one_model(costs, *order.all(several=True), whole=True)
    cells = {asked: _cell(asked, outcome, costs) for asked, outcome in outcomes.items()}
    if as_json:
        others = [{"name": n, "ranks": p, "microbatches": m, "reason": why} for (n, p, m), why in refused.items()]
        print_json({"sweep": [*cells.values()], "not_allowed": others})
        return
    console = screen()
    console.print("[bold]Speedup over one device (and parallel efficiency)[/]")
    _show_costs(costs, _OF_SEVERAL_SIZES, console)
    all_ranks = sorted({p for _, p, _ in (*cells, *refused)})
    all_microbatches = sorted({m for _, _, m in (*cells, *refused)})
    for name in dict.fromkeys(name for name, *_ in cells):
        console.print(f"\n[bold]{name}[/]")
        columns = {
            f"m = {m}": [
                "{speedup:.2f} ({efficiency:.0%})".format(**cell) if (cell := cells.get((name, p, m))) else "-"
                for p in all_ranks
            ]
            for m in all_microbatches
        }
        print_columns(console, {"ranks": all_ranks, **columns}, left=0)
    if refused:
        console.print("\n[bold]Not possible[/]")
    where: defaultdict[tuple[str, str], list[Asked]] = defaultdict(list)
    for one, reason in refused.items():
        where[one[0], reason].append(one)
    for (name, reason), some in where.items():
        p, m = (", ".join(map(str, sorted({one[place] for one in some}))) for place in (1, 2))
        console.print(f"{name}, p = {p}, m = {m}: {reason}", soft_wrap=True)
    console.print("\nm: microbatches. One device runs the whole model on the same number.", style="dim")


def _cell(asked: Asked, outcome: Outcome, costs: Costs) -> dict[str, Any]:
    """One schedule beside one device that runs the whole model. `efficiency`: the speed-up, per rank."""
    name, ranks, microbatches = asked
    one = generate("1f1b", 1, microbatches)
    whole = replace(costs.for_model_of(one, whole=True), links=NO_COST).of(one)
    alone, makespan = timeline_of(one, whole).makespan_seconds, outcome.timeline.makespan_seconds
    speedup = alone / makespan if makespan else 1.0  # as fast, if neither takes any time
    return {
        "name": name, "ranks": ranks, "microbatches": microbatches, "makespan": makespan, "one_device": alone,
        "speedup": speedup, "efficiency": speedup / ranks, "bubble_rate": outcome.timeline.bubble_rate,
    }  # fmt: skip

"""`penstock simulate`: shows the time, the bubbles and the memory of a schedule, given costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.cli._cost_options import EPILOG as FILE_EPILOG
from penstock.cli._cost_options import CostOptions
from penstock.cli._options import JSON, output_option, print_json, screen
from penstock.cli._outcome import HEADS, IDLE_NOTE, PEAK_NOTE, show, shown_causes
from penstock.cli._schedule_options import ScheduleOptions, Sized
from penstock.costs import Costs, Outcome, with_one_model
from penstock.report import write_perfetto
from penstock.report.text import format_all, pairs, print_columns
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

_FROM_FILE = "per stage of the model, from the file; "
_WITH_ONE_SIZE = (
    "per microbatch and rank, divided evenly among its stages",
    f"{_FROM_FILE}with fewer stages, neighbors are summed",
)
_WITH_SEVERAL_SIZES = (
    "per microbatch on the whole model, divided evenly among its stages",
    f"{_FROM_FILE}with fewer stages, neighbors are summed",
)
"""Scope of the costs: of numbers, and of those in a file."""


def simulate(
    requested: ScheduleOptions,
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
    stage_costs = costs.read(requested.count, requested.ranks)
    if perfetto is not None and (requested.is_many or requested.sweeps):
        fix = "pass --schedule one name" if requested.is_many else "pass one number of ranks and microbatches"
        raise ArgumentError(f"--perfetto: a trace shows one schedule; {fix}")
    if requested.sweeps:
        _sweep(requested, stage_costs, as_json=as_json)
    elif requested.is_many:
        _compare(requested, stage_costs, as_json=as_json)
    else:
        outcome = Outcome.simulated(requested.one(), stage_costs)
        if perfetto is not None:
            unit = "bytes" if stage_costs.are_measured else ""
            write_perfetto(outcome.timeline, perfetto, memory=outcome.memory_curves, unit=unit)
        if as_json:
            print_json(outcome.to_dict())
        else:
            show(outcome, screen())


def _show_costs(costs: Costs, scope: tuple[str, str], console: Console) -> None:
    if costs.assumed:
        console.print(f"assumed: {costs.assumption}")
    console.print(f"costs: {costs.described(*scope)}")


# -- several schedules ------------------------------------------------------------------------------------------------


def _compare(requested: ScheduleOptions, costs: Costs, *, as_json: bool) -> None:
    """Print every schedule that the options allow, shortest span first."""
    by_name, refused = with_one_model(costs, *requested.all())
    reasons = {name: reason for (name, *_), reason in refused.items()}
    outcomes = sorted(
        by_name.values(), key=lambda o: (o.timeline.span_seconds, o.timeline.makespan_seconds, o.schedule.name)
    )
    if as_json:
        not_allowed = [{"name": name, "reason": reason} for name, reason in reasons.items()]
        print_json({"schedules": [outcome.to_dict() for outcome in outcomes], "not_allowed": not_allowed})
    else:
        _show_all(outcomes, reasons, screen())


def _show_all(outcomes: Sequence[Outcome], reasons: Mapping[str, str], console: Console) -> None:
    """Print a row per schedule, then the schedules that the numbers do not allow, with the reasons."""
    schedule = outcomes[0].schedule
    numbers = f"p = {pluralize(schedule.ranks, 'rank')}, m = {pluralize(schedule.microbatches, 'microbatch')}"
    console.print(f"{numbers}; the shortest span first", style="bold")
    _show_costs(outcomes[0].costs, _WITH_ONE_SIZE, console)
    console.print()
    columns: dict[str, Sequence[object]] = {
        "schedule": [outcome.schedule.name for outcome in outcomes],
        "vpp": [chunks(outcome.schedule) for outcome in outcomes],
        "makespan": format_all([outcome.timeline.makespan_seconds for outcome in outcomes]),
        "span": format_all([outcome.timeline.span_seconds for outcome in outcomes]),
        "bubble": [f"{outcome.timeline.bubble_rate:.1%}" for outcome in outcomes],
        "peak\nact.": format_all([max(outcome.peak_activations) for outcome in outcomes], max_decimals=2),
    }
    for cause in shown_causes(outcomes):
        idle = [(sum(rank[cause] for rank in o.idle), o.timeline.makespan_seconds) for o in outcomes]
        columns[HEADS[cause]] = [f"{100 * t / (makespan * schedule.ranks):.1f}" if t else "-" for t, makespan in idle]
    print_columns(console, columns)
    if reasons:
        console.print("\nNot possible with these numbers", style="bold")
        console.print(pairs(reasons.items()))
    console.print(
        f"\nvpp: stages per rank. Bubble: idle share of the span.\n"
        f"{PEAK_NOTE}\n{IDLE_NOTE} In % of the makespan, averaged over ranks.",
        style="dim",
    )


# -- several numbers of ranks or microbatches -------------------------------------------------------------------------


def _sweep(requested: ScheduleOptions, costs: Costs, *, as_json: bool) -> None:
    """Print the speedup of each schedule over one device, by ranks and microbatches."""
    outcomes, refused = with_one_model(costs, *requested.all(several=True), whole=True)
    cells = {sized: _cell(sized, outcome, costs) for sized, outcome in outcomes.items()}
    if as_json:
        not_allowed = [{"name": n, "ranks": p, "microbatches": m, "reason": r} for (n, p, m), r in refused.items()]
        print_json({"sweep": [*cells.values()], "not_allowed": not_allowed})
        return
    console = screen()
    console.print("Speedup over one device (and parallel efficiency)", style="bold")
    _show_costs(costs, _WITH_SEVERAL_SIZES, console)
    all_ranks = sorted({p for _, p, _ in (*cells, *refused)})
    all_microbatches = sorted({m for _, _, m in (*cells, *refused)})
    for name in dict.fromkeys(name for name, *_ in cells):
        console.print(f"\n{name}", style="bold")
        columns = {
            f"m = {m}": [
                "{speedup:.2f} ({efficiency:.0%})".format(**cell) if (cell := cells.get((name, p, m))) else "-"
                for p in all_ranks
            ]
            for m in all_microbatches
        }
        print_columns(console, {"ranks": all_ranks, **columns}, left=0)
    if refused:
        console.print("\nNot possible", style="bold")
    by_reason: defaultdict[tuple[str, str], list[Sized]] = defaultdict(list)
    for sized, reason in refused.items():
        by_reason[sized[0], reason].append(sized)
    for (name, reason), group in by_reason.items():
        p, m = (", ".join(map(str, sorted({sized[index] for sized in group}))) for index in (1, 2))
        console.print(f"{name}, p = {p}, m = {m}: {reason}", soft_wrap=True)
    console.print("\nm: microbatches. One device runs the whole model on the same number.", style="dim")


def _cell(sized: Sized, outcome: Outcome, costs: Costs) -> dict[str, Any]:
    """Compare a schedule with one device that runs the whole model. `efficiency`: the speedup per rank."""
    name, ranks, microbatches = sized
    serial = generate("1f1b", 1, microbatches)
    model_costs = replace(costs.for_model_of(serial, whole=True), links=NO_COST).of(serial)
    one_device, makespan = timeline_of(serial, model_costs).makespan_seconds, outcome.timeline.makespan_seconds
    speedup = one_device / makespan if makespan else 1.0  # both are 0
    return {
        "name": name, "ranks": ranks, "microbatches": microbatches, "makespan": makespan, "one_device": one_device,
        "speedup": speedup, "efficiency": speedup / ranks, "bubble_rate": outcome.timeline.bubble_rate,
    }  # fmt: skip

"""Schedules for several numbers of ranks and microbatches: how much faster than one device each is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from penstock.cli._order import Asked, OrderOptions
from penstock.costs import Costs, Outcome, with_one_model
from penstock.report.text import print_unbroken, table
from penstock.schedule import generate
from penstock.simulate import NO_COST, simulate

Cell = dict[str, Any]
"""One schedule with one number of ranks and of microbatches, on the same model as all others, as JSON has it:
`makespan` and `one_device`, how long one device takes for as many microbatches, in the unit of the costs; `efficiency`,
the share of the speed-up that as many devices as there are ranks could give."""


def sweep(order: OrderOptions, costs: Costs) -> tuple[list[Cell], dict[Asked, str]]:
    """What was asked for, in order, and why some of it is not possible. Raises ArgumentError if a number is missing or
    less than 1, or nothing is possible."""
    outcomes, refused = with_one_model(costs, *order.all(several=True), whole=True)
    return [_cell(asked, outcome, costs) for asked, outcome in outcomes.items()], refused


def _cell(asked: Asked, outcome: Outcome, costs: Costs) -> Cell:
    name, ranks, microbatches = asked
    one = generate("1f1b", 1, microbatches)
    whole = replace(costs.for_model_of(one, whole=True), links=NO_COST).of(one)
    alone, makespan = simulate(one, whole).makespan_seconds, outcome.timeline.makespan_seconds
    speedup = alone / makespan if makespan else 1.0  # as fast, if neither takes any time
    return {
        "name": name, "ranks": ranks, "microbatches": microbatches, "makespan": makespan, "one_device": alone,
        "speedup": speedup, "efficiency": speedup / ranks, "bubble_rate": outcome.timeline.bubble_rate,
    }  # fmt: skip


def sweep_to_dict(cells: Sequence[Cell], refused: Mapping[Asked, str]) -> dict[str, Any]:
    """The same for JSON."""
    others = [{"name": n, "ranks": p, "microbatches": m, "reason": reason} for (n, p, m), reason in refused.items()]
    return {"sweep": cells, "not_allowed": others}


def show_sweep(made: Sequence[Cell], refused: Mapping[Asked, str], costs: Costs, console: Console) -> None:
    """Prints a table for each schedule: speed-up and efficiency, by ranks and microbatches."""
    console.print("[bold]Speed-up against one device (and its share of the number of ranks)[/]")
    if costs.assumed:
        console.print(f"assumed: {costs.assumption}")
    console.print(f"costs: {costs.described(_OF_MODEL, _OF_STAGES)}")
    cells = {(cell["name"], cell["ranks"], cell["microbatches"]): cell for cell in made}
    places = [*cells, *refused]
    microbatches = sorted({m for _, _, m in places})
    for name in dict.fromkeys(name for name, *_ in cells):
        console.print(f"\n[bold]{name}[/]")
        lines = table("ranks", *(f"m = {m}" for m in microbatches), left=0)
        for ranks in sorted({p for _, p, _ in places}):
            row = (cells.get((name, ranks, m)) for m in microbatches)
            lines.add_row(str(ranks), *("{speedup:.2f} ({efficiency:.0%})".format(**c) if c else "-" for c in row))
        print_unbroken(console, lines)
    if refused:
        console.print("\n[bold]Not possible[/]")
        where: defaultdict[tuple[str, str], list[Asked]] = defaultdict(list)
        for one, reason in refused.items():
            where[one[0], reason].append(one)
        for (name, reason), some in where.items():
            p, m = (", ".join(map(str, sorted({one[place] for one in some}))) for place in (1, 2))
            console.print(f"{name}, p = {p}, m = {m}: {reason}", soft_wrap=True)
    console.print("\nm: microbatches. One device runs the whole model on as many of them.", style="dim")


_OF_MODEL = "for one microbatch on the whole model, divided evenly among its stages"
_OF_STAGES = "for each of the model's stages, from the file; with fewer stages, neighbors are added up"

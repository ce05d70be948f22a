"""Schedules for several numbers of ranks and microbatches: how much faster than one device each is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from penstock.cli._as_typed import in_options
from penstock.cli._order import OrderOptions, weigh
from penstock.costs import Costs, Outcome
from penstock.errors import ArgumentError
from penstock.report.text import print_unbroken, table
from penstock.schedule import Schedule, generate
from penstock.schedule.generators import Numbers
from penstock.simulate import NO_COST, simulate

_JSON_FIELDS = ("name", "ranks", "microbatches", "makespan", "one_device", "speedup", "efficiency", "bubble_rate")


@dataclass(frozen=True, slots=True)
class Cell:
    """One schedule with one number of ranks and of microbatches, on the same model as all others.

    Attributes:
        makespan: in the unit of the costs.
        one_device: how long one device takes for as many microbatches.
    """

    name: str
    ranks: int
    microbatches: int
    makespan: float
    one_device: float
    bubble_rate: float

    @property
    def speedup(self) -> float:
        """How much faster than one device; as fast, if neither takes any time."""
        return self.one_device / self.makespan if self.makespan else 1.0

    @property
    def efficiency(self) -> float:
        """The share of the speed-up that as many devices as there are ranks could give."""
        return self.speedup / self.ranks

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _JSON_FIELDS}


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was asked for, in order, and why some of it is not possible: by schedule, ranks and microbatches."""

    cells: list[Cell] = field(default_factory=list)
    refused: dict[tuple[str, int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, order: OrderOptions, costs: Costs) -> Sweep:
        """Raises ArgumentError if a number is missing or less than 1, or nothing is possible."""
        made = cls()
        asked = [(one, entry, one.numbers_of(entry)) for entry in order.entries() for one in order.each()]
        weigh((entry, numbers) for _, entry, numbers in asked if not entry.refusal(numbers))
        for one, entry, numbers in asked:
            reason = entry.refusal(numbers)
            if not reason:
                try:
                    made.cells.append(_cell(one.made(entry, numbers), numbers, costs))
                except ArgumentError as error:
                    reason = in_options(str(error), ("--unshard-window",))
            if reason:
                made.refused[entry.name, numbers.ranks, numbers.microbatches] = reason
        if not made.cells:
            name, reason = next((name, reason) for (name, *_), reason in made.refused.items())
            raise ArgumentError(reason if reason.startswith("--") else f"--schedule {name}: {reason}")
        return made

    def to_dict(self) -> dict[str, Any]:
        others = [
            {"name": name, "ranks": ranks, "microbatches": microbatches, "reason": reason}
            for (name, ranks, microbatches), reason in self.refused.items()
        ]
        return {"sweep": [cell.to_dict() for cell in self.cells], "not_allowed": others}


def _cell(schedule: Schedule, numbers: Numbers, costs: Costs) -> Cell:
    timeline = Outcome.simulated(schedule, costs.of_whole_model(schedule)).timeline
    one = generate("1f1b", 1, numbers.microbatches)
    whole = replace(costs.of_whole_model(one), links=NO_COST).of(one)
    alone = simulate(one, whole).makespan_seconds
    return Cell(
        schedule.name, schedule.ranks, schedule.microbatches, timeline.makespan_seconds, alone, timeline.bubble_rate
    )


def show_sweep(sweep: Sweep, costs: Costs, console: Console) -> None:
    """Prints a table for each schedule: speed-up and efficiency, by ranks and microbatches."""
    console.print("[bold]Speed-up against one device (and its share of the number of ranks)[/]")
    if costs.assumed:
        console.print(f"assumed: {costs.assumption}")
    console.print(f"costs: {costs.described(_OF_MODEL, _OF_STAGES)}")
    places = [(cell.name, cell.ranks, cell.microbatches) for cell in sweep.cells] + list(sweep.refused)
    cells = {(cell.name, cell.ranks, cell.microbatches): cell for cell in sweep.cells}
    microbatches = sorted({m for _, _, m in places})
    for name in dict.fromkeys(cell.name for cell in sweep.cells):
        console.print(f"\n[bold]{name}[/]")
        made = table("ranks", *(f"m = {m}" for m in microbatches), left=0)
        for ranks in sorted({p for _, p, _ in places}):
            made.add_row(str(ranks), *(_text(cells.get((name, ranks, m))) for m in microbatches))
        print_unbroken(console, made)
    if sweep.refused:
        console.print("\n[bold]Not possible[/]")
        for (name, reason), where in _by_reason(sweep).items():
            console.print(f"{name}, {where}: {reason}", soft_wrap=True)
    console.print("\nm: microbatches. One device runs the whole model on as many of them.", style="dim")


_OF_MODEL = "for one microbatch on the whole model, divided evenly among its stages"
_OF_STAGES = "for each of the model's stages, from the file; with fewer stages, neighbors are added up"


def _text(cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell.speedup:.2f} ({cell.efficiency:.0%})"


def _by_reason(sweep: Sweep) -> dict[tuple[str, str], str]:
    """For each schedule and reason, the numbers of ranks and microbatches."""
    found: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for (name, ranks, microbatches), reason in sweep.refused.items():
        found[name, reason].append((ranks, microbatches))
    return {
        key: f"p = {_numbers(p for p, _ in where)}, m = {_numbers(m for _, m in where)}" for key, where in found.items()
    }


def _numbers(numbers: Iterable[int]) -> str:
    once: Sequence[int] = sorted(set(numbers))
    return ", ".join(map(str, once))

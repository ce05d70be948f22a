"""The options for what every rank does besides its stages: parts of a vocabulary, an optimizer, a last collective."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text

from penstock.cli._costs import Costs
from penstock.cli._order import OrderOptions
from penstock.cli._outcome import PEAK_NOTE, format_of, print_unbroken, table, title
from penstock.cli._spread import options_on
from penstock.errors import ArgumentError
from penstock.schedule import Schedule
from penstock.simulate import peaks
from penstock.simulate.figures import units_of_memory, with_activations
from penstock.simulate.passes_run import WithPasses, simulate_with
from penstock.simulate.vocabulary import IN_FLIGHT, Vocabulary

_option = options_on("Passes on every rank: of one microbatch, in the unit of the costs")


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What every rank does besides its stages. None means not given."""

    vocabulary: Annotated[
        str | None,
        _option(f"A vocabulary in parts on all ranks, with 1f1b: {', '.join(IN_FLIGHT)} (arXiv 2411.05288)."),
    ] = None
    output_pass: Annotated[
        float | None, _option("What a rank's part of the output layer takes, forward and backward; default 1.")
    ] = None
    embedding_pass: Annotated[
        float | None, _option("What a rank's part of the embedding takes, forward and backward each; default 0.")
    ] = None
    collective: Annotated[float | None, _option("How long a collective of all ranks takes; default 0.")] = None
    optimizer: Annotated[float | None, _option("Time per step after the last action, e.g. the optimizer's.")] = None
    last_collective: Annotated[
        float | None,
        _option("What all ranks do together once a step, before the optimizer: as the sum of the gradients' norms."),
    ] = None

    @property
    def given(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__slots__)

    def outcome(self, order: OrderOptions, costs: Costs) -> PassOutcome:
        """Simulates the schedule with what the options add. Raises ArgumentError: a number is negative, or an option
        does not fit the others."""
        for name in ("output_pass", "embedding_pass", "collective", "optimizer", "last_collective"):
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is not None and not 0 <= value < float("inf"):
                raise ArgumentError(f"{option} {value:g}: expected a time of 0 or more")
            if value is not None and self.vocabulary is None and name not in ("optimizer", "last_collective"):
                raise ArgumentError(f"{option} has no effect without --vocabulary; give both")
        if order.is_many or order.sweeps:
            raise ArgumentError(
                "passes on every rank are timed for one schedule: give one name, and one number of each"
            )
        schedule, passes = order.one(), []
        if self.vocabulary is not None:
            if order.csv is not None or schedule.name != "1f1b":
                raise ArgumentError(
                    f"--vocabulary {self.vocabulary}: it orders microbatches as 1f1b does; give --schedule 1f1b"
                )
            part, embedding, collective = self.output_pass, self.embedding_pass or 0.0, self.collective or 0.0
            spread = Vocabulary(self.vocabulary, 1.0 if part is None else part, embedding, embedding, collective)
            schedule, passes = spread.schedule(schedule.ranks, schedule.microbatches), spread.passes()
        timed = simulate_with(schedule, costs.of(schedule), passes, costs.links, contended=costs.contended)
        return PassOutcome(schedule, costs, timed, self.last_collective or 0.0, self.optimizer or 0.0)


@dataclass(frozen=True)
class PassOutcome:
    """A simulated schedule with passes. Numbers are in the units of the costs."""

    schedule: Schedule
    costs: Costs
    timed: WithPasses
    last_collective: float
    optimizer: float

    @property
    def step(self) -> float:
        """How long the whole step takes: the collective waits for the last rank, and the optimizer for it."""
        return self.timed.makespan_seconds + self.last_collective + self.optimizer

    @cached_property
    def peak_activations(self) -> list[float]:
        """Each rank's peak, in units of one microbatch's activations on all of the rank's stages."""
        placement = self.schedule.placement
        costs = with_activations(placement, self.costs.of(self.schedule), self.schedule.slices)
        units = units_of_memory(placement, costs, self.schedule.slices)
        held = peaks(self.schedule, costs, self.timed.timeline)
        return [one.activations / unit for one, unit in zip(held, units, strict=True)]

    def of_rank(self, rank: int) -> dict[str, float]:
        """How long a rank is busy with what in a step; the rest is idle."""
        busy, passes = self.timed.timeline.busy_seconds(rank), self.timed.pass_seconds(rank)
        idle = self.step - busy - passes - self.last_collective - self.optimizer
        return {"busy": busy, "passes": passes, "idle": idle}

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        ranks = range(self.schedule.ranks)
        return {
            "name": self.schedule.name,
            "ranks": self.schedule.ranks,
            "microbatches": self.schedule.microbatches,
            "makespan": self.timed.makespan_seconds,
            "last_collective": self.last_collective,
            "optimizer": self.optimizer,
            "step": self.step,
            "peak_activations": self.peak_activations,
            "by_rank": [self.of_rank(rank) for rank in ranks],
        }

    def show(self, console: Console) -> None:
        """Prints the figures and a table of the ranks."""
        by_rank = [self.of_rank(rank) for rank in range(self.schedule.ranks)]
        times = format_of([self.step, *(value for of_rank in by_rank for value in of_rank.values())])
        width = len(times(self.step))
        console.print(Text(title(self.schedule), "bold"), end="\n\n")
        lines = {"makespan": self.timed.makespan_seconds, "last collective": self.last_collective}
        for name, value in (lines | {"optimizer": self.optimizer, "step": self.step}).items():
            console.print(f"{name:<17}{times(value):>{width}}")
        idle = sum(of_rank["idle"] for of_rank in by_rank) / (self.step * len(by_rank)) if self.step else 0.0
        console.print(f"{'idle':<17}{idle:.2%} of the step\n")
        made, peak = table("rank", *by_rank[0], "peak"), format_of(self.peak_activations, most=2)
        for rank, of_rank in enumerate(by_rank):
            made.add_row(str(rank), *map(times, of_rank.values()), peak(self.peak_activations[rank]))
        print_unbroken(console, made)
        console.print(
            f"\nPasses: what every rank does for each microbatch besides its stages.\n{PEAK_NOTE}", style="dim"
        )

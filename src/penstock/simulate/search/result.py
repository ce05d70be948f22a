"""The result of a search, as checked and timed by the library itself; and the answers that are known before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import Schedule, check, generate, schedule_specs, split_backward
from penstock.schedule.timeline import Timeline
from penstock.simulate import Links, simulate
from penstock.simulate.costs import StageCost
from penstock.simulate.search.problem import Objective, Problem, Rows, lanes_in_row
from penstock.simulate.search.timing import fits, time_rows


@accept_old_names(known="baseline", known_seconds="baseline_seconds")
@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best schedule found.

    Attributes:
        schedule: F, I and W only (or a generator's own schedule, if its overlaps make it the best); without messages.
        timeline: as `penstock.simulate` times it.
        objective: what was minimized.
        objective_seconds: its value.
        lower_bound_seconds: no schedule can be better.
        baseline: the best generator that fits, by name; None if none does.
        baseline_seconds: its objective; infinite if there is none.
        search_seconds: how long the search took.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    objective_seconds: float
    lower_bound_seconds: float
    baseline: str | None
    baseline_seconds: float
    search_seconds: float

    @property
    def gap(self) -> float:
        """How much worse it is than the lower bound, as a share of the bound. 0: it is optimal."""
        bound = self.lower_bound_seconds
        return max(0.0, self.objective_seconds / bound - 1.0) if bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether it is optimal: as good as the lower bound, up to rounding."""
        return self.gap <= 1e-6


def evaluate(
    schedule: Schedule, costs: StageCost | Sequence[StageCost], links: Links, objective: Objective
) -> tuple[Timeline, float]:
    """Evaluate a schedule that the search produced: return its timeline and objective. Raise ScheduleError if it is
    illegal."""
    if problems := check(schedule):
        raise ScheduleError(f"the search made a schedule that is not legal, which is a defect of it: {problems[0]}")
    return simulate_objective(schedule, costs, links, objective)


def simulate_objective(
    schedule: Schedule, costs: StageCost | Sequence[StageCost], links: Links, objective: Objective
) -> tuple[Timeline, float]:
    """Evaluate a schedule that is known to be legal: return its timeline and objective."""
    timeline = simulate(schedule, costs, links)
    return timeline, objective_of(timeline, objective)


def objective_of(timeline: Timeline, objective: Objective) -> float:
    """Return what a search minimizes."""
    return timeline.makespan_seconds if objective == "makespan" else timeline.span_seconds


@dataclass(frozen=True, slots=True)
class Baseline:
    """A generator's schedule that fits in memory: its objective, and its rows.

    The rows are None if they cannot express it: it has whole backwards, overlaps, or microbatches that do not ascend.
    """

    schedule: Schedule
    seconds: float
    rows: Rows | None


def find_baselines(problem: Problem, costs: StageCost | Sequence[StageCost], links: Links) -> list[Baseline]:
    """Return the schedules of all generators that have the problem's placement and fit in its memory: as they are, and
    with their backwards split, which is never worse except for overlaps."""
    baselines: list[Baseline] = []
    for spec in schedule_specs():
        chunks = problem.placement.depth // problem.ranks or 1
        try:
            schedule = generate(spec.name, problem.ranks, problem.microbatches, chunks)
        except ArgumentError:  # does not work for these numbers
            continue
        split = split_backward(schedule)
        if schedule.placement != problem.placement or not all(
            fits(problem, rank, lanes_in_row(row)) for rank, row in enumerate(split.rows)
        ):
            continue
        is_split = split.rows == schedule.rows and not any(any(row.joined) for row in schedule.rows)
        if not is_split:
            baselines.append(Baseline(schedule, simulate_objective(schedule, costs, links, problem.objective)[1], None))
        rows = problem.rows(split)
        timing = None if rows is None else time_rows(problem, rows)
        if rows is not None and timing is not None:
            name = schedule.name if is_split else f"{schedule.name}, split"
            baselines.append(Baseline(problem.schedule(name, rows), timing.cost, rows))
    return baselines


def serial_rows(problem: Problem, *, last_first: bool = False) -> Rows:
    """Return rows that run one microbatch at a time, there and back: they fit in memory if anything does.

    Args:
        problem: the question.
        last_first: begin with the last pipeline. If memory is tight, no move leads from one order to the other.
    """
    placement = problem.placement
    rows: Rows = [[] for _ in range(problem.ranks)]
    firsts = range(0, problem.stages, placement.depth)
    for first in reversed(firsts) if last_first else firsts:
        stages = range(first, first + placement.depth)
        for _ in range(problem.count[3 * first]):
            for stage in stages:
                rows[placement.rank_of[stage]].append(3 * stage)
            for stage in reversed(stages):
                rows[placement.rank_of[stage]] += [3 * stage + 1, 3 * stage + 2]
    return rows

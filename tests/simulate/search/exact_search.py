"""The optimal schedule for small cases, proven by constraint programming: CP-SAT of `ortools`.

Every action is an interval, and a rank's intervals do not overlap. What a microbatch holds is also an interval, from F
to I and from F to W; together, a rank's intervals stay within its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ortools.sat.python import cp_model

from penstock.schedule import Placement
from penstock.simulate import NO_COST, Links, StageCost
from penstock.simulate.search import Objective, Problem, SearchResult, problem, search
from penstock.simulate.search.bounds import memory_waits
from penstock.simulate.search.problem import Rows
from penstock.simulate.search.result import evaluate
from penstock.simulate.search.timing import fits, time_rows

_UNITS = 2**40  # the largest whole number for a time or a memory


def exact(
    placement: Placement,
    microbatches: int,
    costs: StageCost | Sequence[StageCost],
    links: Links = NO_COST,
    *,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
    seconds: float = 60.0,
) -> SearchResult:
    """The best schedule, with `Found.proven` if no other can be better; otherwise the best found in the time.

    It begins with what a short `search` finds. The solver's model is slightly looser than reality if costs are not
    round numbers, and for the span of ranks on which several pipelines begin.
    """
    start = search(placement, microbatches, costs, links, memory_limit=memory_limit, objective=objective, seconds=0.2)
    asked = problem(placement, microbatches, costs, links, memory_limit=memory_limit, objective=objective)
    rows = asked.rows(start.schedule)
    if start.proven or rows is None:
        return start
    model = _Model(asked, rows, start.lower_bound_seconds, cp_model.CpModel())
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model.model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN), solver.status_name(status)
    bound = max(start.lower_bound_seconds, solver.best_objective_bound / model.scale)
    solved = None if status == cp_model.UNKNOWN else _better(asked, model.rows(solver), start.objective_seconds)
    schedule = start.schedule if solved is None else asked.schedule("exact", solved)
    timeline, objective_seconds = evaluate(schedule, costs, links, objective)
    return replace(
        start,
        schedule=schedule,
        timeline=timeline,
        objective_seconds=objective_seconds,
        lower_bound_seconds=bound,
    )


def _better(asked: Problem, rows: Rows, than: float) -> Rows | None:
    """The solver's rows, if they fit in memory and have a smaller objective; the looser model does not guarantee it."""
    timing = time_rows(asked, rows)
    allowed = all(fits(asked, rank, row) for rank, row in enumerate(rows))
    return rows if timing is not None and allowed and timing.cost < than else None


class _Model:
    """The question in whole numbers, for the solver.

    Times and memory are scaled without error if possible, and rounded down otherwise, so that bounds stay bounds.
    """

    def __init__(self, asked: Problem, rows: Rows, bound: float, model: cp_model.CpModel) -> None:
        timing = time_rows(asked, rows)
        assert timing is not None
        self.asked, self.model = asked, model
        longest = max(ends[-1] for ends in timing.ends if ends)
        self.scale = _scale([*asked.seconds, *asked.lag], longest)
        self.seconds = [math.floor(value * self.scale + 1e-6) for value in asked.seconds]
        self.lag = [math.floor(value * self.scale + 1e-6) for value in asked.lag]
        # With `span`, ranks may end late, but none later than the last rank's start and the span allow.
        horizon = math.ceil(2 * longest * self.scale) + 1
        self.start: list[list[cp_model.IntVar]] = [
            [model.new_int_var(0, horizon, f"{lane} {k}") for k in range(count)]
            for lane, count in enumerate(asked.count)
        ]
        for lane, ends in enumerate(timing.ends):
            for variable, end in zip(self.start[lane], ends, strict=True):
                model.add_hint(variable, max(0, math.floor((end - asked.seconds[lane]) * self.scale + 1e-6)))
        self._order()
        self._resources(horizon)
        cost = model.new_int_var(
            math.floor(bound * self.scale * (1 - 1e-9)), math.ceil(timing.cost * self.scale), "cost"
        )
        self._objective(cost)
        model.minimize(cost)

    def rows(self, solver: cp_model.CpSolver) -> Rows:
        """The solution's order on each rank."""
        asked = self.asked
        rows = []
        for stages in asked.placement.by_rank:
            placed = []
            for lane in (3 * stage + op for stage in stages for op in range(3)):
                trip = (lane, -lane, asked.lanes)[lane % 3]  # for actions that take no time: F up, then I down, then W
                for k, variable in enumerate(self.start[lane]):
                    start = solver.value(variable)
                    placed.append((start, start + self.seconds[lane], k, lane % 3, trip, lane))
            rows.append([entry[-1] for entry in sorted(placed)])
        return rows

    def _end(self, lane: int, k: int) -> cp_model.LinearExpr | Any:
        return self.start[lane][k] + self.seconds[lane]

    def _order(self) -> None:
        """Constraints: microbatches ascend; stages follow each other; forwards wait for what makes room."""
        asked, model = self.asked, self.model
        for lane, starts in enumerate(self.start):
            source = asked.need[lane]
            for k, start in enumerate(starts):
                if k:
                    model.add(start >= self._end(lane, k - 1))
                if lane % 3:
                    model.add(start >= self._end(lane - 1, k))
                if source >= 0:
                    model.add(start >= self._end(source, k) + self.lag[lane])
        for lane, source, lead in memory_waits(asked):
            for k in range(max(0, lead), asked.count[lane]):
                model.add(self.start[lane][k] >= self._end(source, k - lead))

    def _resources(self, horizon: int) -> None:
        """Constraints: a rank runs one action at a time and holds no more than its limit."""
        asked, model = self.asked, self.model
        for rank, stages in enumerate(asked.placement.by_rank):
            lanes = [3 * stage + op for stage in stages for op in range(3)]
            model.add_no_overlap(
                [
                    model.new_fixed_size_interval_var(s, self.seconds[lane], "")
                    for lane in lanes
                    for s in self.start[lane]
                ]
            )
            limit = asked.limit[rank]
            if limit == math.inf:
                continue
            unit = _scale([value for s in stages for value in (asked.held[s], asked.kept[s])], limit)
            held, demands = [], []
            for stage in stages:
                kept = math.floor(asked.kept[stage] * unit + 1e-6)
                until_input = math.floor((asked.held[stage] - asked.kept[stage]) * unit + 1e-6)
                for lane, demand in ((3 * stage + 1, until_input), (3 * stage + 2, kept)):
                    for k, start in enumerate(self.start[3 * stage] if demand else ()):
                        size = model.new_int_var(0, horizon, "")
                        held.append(model.new_interval_var(start, size, self._end(lane, k), ""))
                        demands.append(demand)
            model.add_cumulative(held, demands, math.floor(limit * unit + 1e-6))

    def _objective(self, cost: cp_model.IntVar) -> None:
        asked, model = self.asked, self.model
        for stages in asked.placement.by_rank:
            firsts = {asked.placement.pipeline_of(stage): 3 * stage for stage in reversed(stages)}
            for lane in [lane for lane in firsts.values() if asked.objective == "span" and self.start[lane]]:
                first, source = self.start[lane][0], asked.need[lane]
                if len(firsts) == 1:  # the rank's first action, which starts as soon as it can
                    model.add(first == (self._end(source, 0) + self.lag[lane] if source >= 0 else 0))
                for stage in stages:
                    if asked.count[3 * stage]:
                        model.add(cost >= self._end(3 * stage + 2, asked.count[3 * stage] - 1) - first)
            if asked.objective == "makespan":
                for stage in stages:
                    if asked.count[3 * stage]:
                        model.add(cost >= self._end(3 * stage + 2, asked.count[3 * stage] - 1))


def _scale(values: Sequence[float], largest: float) -> float:
    """The factor that turns the values into whole numbers: a power of ten that is exact, if there is one."""
    for exponent in range(10):
        scale = 10.0**exponent
        if largest * scale > _UNITS:
            break
        if all(abs(value * scale - round(value * scale)) <= 1e-9 * max(1.0, value * scale) for value in values):
            return scale
    return min(_UNITS, 2**30) / largest if largest else 1.0

"""What a plan or a profile said that stages would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.costs import Profile, UnitCost, best_cuts
from penstock.costs.links import link_for
from penstock.costs.stage_costs import build_cut_problem, price_stages
from penstock.plan.explain.schedules import Price
from penstock.plan.plan import Plan
from penstock.schedule import Schedule, names
from penstock.schedule.timeline import Timeline
from penstock.simulate import NO_COST, LinkCost, StageCost, simulate
from penstock.simulate.computations import Floats
from penstock.trace.measured import TraceSteps
from penstock.trace.runs import RecordedRun

_TINY = 1e-12
_TIMES = "forward_seconds", "input_gradient_seconds", "weight_gradient_seconds"
_ALIKE_FACTOR = 1.5
"""By how much more one stage may differ from what was predicted than another, if the prediction is of this run."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one microbatch was predicted to take on each stage.

    Attributes:
        stage_seconds: F + I + W of each stage.
        pipeline_seconds: of a step, as the plan or the run's folder predicted it; 0: simulated from the stages' costs.
        units: the model's units, in order; empty if only stages are known.
        costs: of each stage; empty if only its seconds are known.
        link: what a message costs.
        action_seconds: what the runtime adds to an action.
        starts: the unit with which each stage begins, by its place.
        guessed: whether the starts are the profile's own best, because the run's cuts are unknown.
        price: what splitting the stages' backwards costs, if it was measured.
        note: why it may be a prediction of something else.
        unchecked: what was not compared with the run, such as threads.
    """

    stage_seconds: tuple[float, ...]
    pipeline_seconds: float = 0.0
    units: tuple[UnitCost, ...] = ()
    costs: tuple[StageCost, ...] = ()
    link: LinkCost = NO_COST
    action_seconds: float = 0.0
    starts: tuple[int, ...] = ()
    guessed: bool = False
    price: tuple[Price, ...] | None = None
    note: str = ""
    unchecked: str = ""

    @classmethod
    def of_run(cls, run: RecordedRun) -> Prediction | None:
        """Build the prediction that a run has in its folder; None if it has none."""
        recorded = run.predicted()
        return None if recorded is None else cls(recorded.stage_seconds, recorded.step_seconds)

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        stages: int,
        cuts: Sequence[str] | None = None,
        rows: int | None = None,
        threads: int = 0,
        *,
        splits: bool = False,
    ) -> Prediction:
        """Build the prediction from a profile's units cut into this many stages.

        Args:
            profile: of the model that ran; of several sizes, that of the run's microbatches counts.
            stages: how many there are.
            cuts: the unit with which each stage but the first begins; None: where the profile itself would cut.
            rows: of a microbatch, if that is known.
            threads: of a rank, on a CPU; 0: not known.
            splits: whether the run split backwards.

        Raises:
            ArgumentError: a cut is no unit, or they are not as many as the stages need.
        """
        sizes, notes = {size.rows: size for size in profile.each_size}, []
        if rows is None and len(sizes) > 1:
            notes.append(f"the run does not say how many rows a microbatch has; the profile's {profile.rows} are taken")
        elif rows and any(sizes) and rows not in sizes:
            notes.append(f"microbatches have {rows} rows, and the profile is of {', '.join(map(str, sizes))}")
        if threads not in (0, profile.threads) and profile.device == "cpu":
            notes.append(f"ranks had {pluralize(threads, 'thread')}, and the profile was made with {profile.threads}")
        unchecked = ["threads"] * (not threads and profile.device == "cpu") + ["rows"] * (not rows or not any(sizes))
        profile = sizes.get(rows or 0, profile)
        unit_names = [unit.name for unit in profile.units]
        units = tuple(unit.split if splits else unit for unit in profile.units)
        link = link_for(profile)
        if cuts is None:
            starts = best_cuts(build_cut_problem(units, link), stages)
        else:
            first = {
                cut: [n for n, name in enumerate(unit_names) if f"{name}.".startswith(f"{cut}.")][:1] for cut in cuts
            }
            if unknown := [cut for cut in cuts if not first[cut]]:
                raise ArgumentError(
                    f"cuts={list(cuts)}: {unknown[0]!r} is no unit of the profile: that is of another model, or these "
                    "are not the cuts of the run"
                )
            starts = [0, *(n for cut in cuts for n in first[cut])]
            if len(starts) != stages or starts != sorted({*starts}):
                raise ArgumentError(
                    f"cuts={list(cuts)}: expected {stages - 1} in order, for the {stages} stages of the run"
                )
        action, guessed, note = profile.action_seconds or 0.0, cuts is None, "; ".join(notes)
        costs = price_stages(units, starts, action)
        price = _split_price(profile, starts)
        other = " or ".join(filter(None, [", ".join(unchecked), "devices"]))
        return cls(_seconds(costs), 0.0, units, costs, link, action, tuple(starts), guessed, price, note, other)

    def timeline(self, schedule: Schedule) -> Timeline:
        """Simulate a step with these costs. If only sums per stage are known, F, I and W take the same time: a rough
        estimate, without messages."""
        costs = self.costs or [StageCost(seconds / 3, seconds / 3, seconds / 3) for seconds in self.stage_seconds]
        return simulate(schedule, costs, self.link)

    def ratios(self, measured: Sequence[float]) -> tuple[float, float]:
        """Return the least and the largest ratio of what a stage took to what was predicted."""
        ratios = [took / expected for took, expected in zip(measured, self.stage_seconds, strict=False) if expected]
        return min(ratios, default=1.0), max(ratios, default=1.0)

    def is_off(self, measured: Sequence[float]) -> bool:
        """Whether what stages took says that the prediction is of other stages."""
        least, largest = self.ratios(measured)
        return largest > _ALIKE_FACTOR * least

    def unlikely(self, measured: Sequence[float]) -> bool:
        """Whether the starts are guessed, and were probably others."""
        return self.guessed and self.is_off(measured)

    def recut(self, measured: Sequence[float]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """Return the best cuts, and what each stage then takes under two assumptions: the ratio of measured to
        predicted time belongs to the units of the stage, or to the rank that runs it.

        Args:
            measured: F + I + W of each stage, as it ran.
        """
        ends = [*self.starts[1:], len(self.units)]
        ratios = [took / plan if plan else 1.0 for took, plan in zip(measured, self.stage_seconds, strict=True)]
        scaled = [
            replace(unit, **{name: getattr(unit, name) * ratio for name in _TIMES})
            for ratio, start, end in zip(ratios, self.starts, ends, strict=True)
            for unit in self.units[start:end]
        ]
        starts = best_cuts(build_cut_problem(scaled, self.link), len(self.starts))
        overhead = 2 * self.action_seconds  # of F, and of B or I
        units = _seconds(price_stages(scaled, starts))
        stages = _seconds(price_stages(self.units, starts, self.action_seconds))
        by_unit = tuple(seconds + overhead * ratio for seconds, ratio in zip(units, ratios, strict=True))
        return tuple(starts), by_unit, tuple(seconds * ratio for seconds, ratio in zip(stages, ratios, strict=True))


def check_followed(plan: Plan, run: TraceSteps, what: str) -> Plan:
    """Return the plan. Raise ArgumentError if the run visibly did not follow it. `what`: the beginning of the
    message."""
    order, about, choice = run.typical.slowest.schedule, run.about, plan.choice
    remedy = "Pass the plan of the run, or omit --plan"
    run_names = {order.name} & {*names()} if about is None else {about.schedule}
    run_sizes = [order.ranks, order.placement.depth, order.microbatches]
    plan_sizes = [choice.ranks, choice.stages, choice.microbatches]
    cuts = None if about is None else [*about.cuts]
    if run_sizes != plan_sizes or not run_names <= {choice.schedule} or cuts not in (None, [*plan.cuts]):
        raise ArgumentError(
            f"{what}: the run, {_describe(order.name, run_sizes, cuts)}, did not follow it: "
            f"{_describe(choice.schedule, plan_sizes, plan.cuts)}. {remedy}"
        )
    if plan.made_for is not None and about is not None and about.parameters:
        size = sum(prod(shape) for shape in plan.made_for.parameters.values())
        if size != about.parameters:
            raise ArgumentError(
                f"{what}: it is for a model of {size:,} parameters, and the run's, {about.model}, has "
                f"{about.parameters:,}. {remedy}"
            )
    return plan


def _describe(schedule: str, sizes: Sequence[int], cuts: Sequence[str] | None) -> str:
    counts = ", ".join(map(pluralize, sizes, ("rank", "stage", "microbatch")))
    return f"{schedule} with {counts}" + ("" if cuts is None else f", cut at {', '.join(cuts) or 'nothing'}")


def _seconds(costs: Sequence[StageCost]) -> tuple[float, ...]:
    return tuple(cost.forward_seconds + cost.backward_seconds for cost in costs)


def _split_price(profile: Profile, starts: Sequence[int]) -> tuple[Price, ...] | None:
    """Return the cost of splitting the backward of each stage, with bounds; None if it was not measured."""
    if not all(unit.split_forward_seconds is not None for unit in profile.units):
        return None
    variants, action = (profile.units, [unit.split for unit in profile.units]), profile.action_seconds or 0.0
    unsplit, split = (price_stages(units, starts, action) for units in variants)

    def shares(part: str, base: str) -> Floats:
        return np.array([getattr(a, part) / max(getattr(b, base), _TINY) for a, b in zip(split, unsplit, strict=True)])

    times = shares("forward_seconds", "forward_seconds")
    inputs, weights = (shares(f"backward_{part}_seconds", "backward_seconds") for part in ("input", "weight"))
    spread = np.add.reduceat([unit.seconds * unit.spread for unit in profile.units], starts)
    spread /= [max(cost.forward_seconds + cost.backward_seconds, _TINY) for cost in unsplit]
    best = np.maximum(1 - spread / 2, 1 / np.maximum(inputs + weights, _TINY))  # both parts are no less than the whole
    bounds = (np.ones_like(spread), best, 1 + spread / 2)
    return tuple(Price(tuple(np.maximum(times * f, 1.0)), tuple(inputs * f), tuple(weights * f)) for f in bounds)

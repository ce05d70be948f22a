"""What was measured, beside what is predicted of it: tables of errors."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from calibration import Host
from shared import step_seconds

from penstock import Profile
from penstock.costs import UnitCost
from penstock.costs.stage_costs import stage_cost
from penstock.schedule import Schedule, generate
from penstock.simulate import StageCost

CORES = os.cpu_count() or 1
REPETITIONS = 2
DISTURBED = 0.02
"""A step is left out if, with a core for each rank, a rank waited for its core for more of it than this."""


@dataclass(frozen=True)
class Ran:
    """A plan that was run: what it decided, and what was predicted of it, as in `penstock.plan.Plan`."""

    ranks: int
    chunks: int
    schedule: str
    microbatches: int
    rows: int
    cuts: tuple[str, ...]
    step_seconds: float
    memory_bytes: tuple[float, ...]

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> Ran:
        """From what `Plan.to_dict` made."""
        chosen = {name: plan["choice"][name] for name in ("ranks", "chunks", "schedule", "microbatches", "rows")}
        return cls(
            **chosen,
            cuts=tuple(plan["cuts"]),
            step_seconds=plan["step_seconds"],
            memory_bytes=tuple(plan["memory_bytes"]),
        )

    @property
    def order(self) -> Schedule:
        """The actions of each rank."""
        return generate(self.schedule, self.ranks, self.microbatches, self.chunks)


@dataclass(frozen=True)
class Row:
    """One configuration. Errors are predicted / measured - 1.

    Attributes:
        seconds: the median of the steps that count, and how many those were.
        plain: the error of the prediction from the profile, the runtime's time and messages, as a plan makes it.
        bare: the median error of predictions scaled by what the stages took alone in the same round.
        error: the same with the loss, and the runtime's own time and messages.
        memory: the error of each rank's peak.
    """

    model: str
    ranks: int
    plan: Ran
    seconds: float
    count: int
    plain: float
    bare: float
    error: float
    memory: list[float]


def rows(model: str, ranks: int, measured: Mapping[str, Any], host: Host) -> Iterator[Row]:
    """One for each plan that was run."""
    profile = Profile.from_dict(measured["profile"])
    by_rows = {one.rows: one for one in profile.each_size}
    for place, text in enumerate(measured["plans"]):
        plan = Ran.of(text)
        units = by_rows[plan.rows].units
        tried = [one[place] for one in measured["rounds"]]
        good = [one for one in tried if counts(one["step"], ranks)] or tried
        walls = [max(took["wall"] for took in one["step"]) for one in good]
        clock = "own" if ranks > CORES else "wall"  # ranks that share a core delay each other's ceilings, too
        alone = [[took[clock] / REPETITIONS for took in one["alone"]] for one in good]
        loss = measured["loss"][str(plan.rows)]
        plain, median = predicted(plan, units, host), statistics.median(walls)
        bare = [predicted(plan, units, Host(), each) for each in alone]
        full = [predicted(plan, units, host, each, loss) for each in alone]
        memory = memory_errors(plan, units, measured["memory"][place])
        errors = plain / median - 1, _error(bare, walls), _error(full, walls)
        yield Row(model, ranks, plan, median, len(good), *errors, memory)


def counts(took: Sequence[Mapping[str, float]], ranks: int) -> bool:
    """Whether nothing else held the ranks up. With fewer cores than ranks they hold each other up."""
    return ranks > CORES or all(one["delayed"] <= DISTURBED * one["wall"] for one in took)


def _error(ahead: Sequence[float], walls: Sequence[float]) -> float:
    return statistics.median(one / wall - 1 for one, wall in zip(ahead, walls, strict=True))


def predicted(
    plan: Ran,
    units: Sequence[UnitCost],
    host: Host,
    alone: Sequence[float] | None = None,
    loss: Sequence[float] = (0.0, 0.0),
    cores: int = CORES,
) -> float:
    """A step of the plan on this machine's cores.

    Args:
        alone: what each rank took for F and B of one microbatch on its stages; None: as the profile says.
        loss: its forward and backward.
    """
    schedule = plan.order
    costs, rank_of = stage_costs(plan.cuts, units), schedule.placement.rank_of
    slower = [1.0] * plan.ranks
    if alone is not None:
        profiled = [0.0] * plan.ranks
        for cost, rank in zip(costs, rank_of, strict=True):
            profiled[rank] += cost.forward_seconds + cost.backward_seconds
        slower = [took / was for took, was in zip(alone, profiled, strict=True)]
    if schedule.splits:
        costs = stage_costs(plan.cuts, [unit.split for unit in units])
    costs = [scaled(cost, slower[rank]) for cost, rank in zip(costs, rank_of, strict=True)]
    costs[-1] = replace(
        costs[-1],
        forward_seconds=costs[-1].forward_seconds + loss[0],
        backward_input_seconds=costs[-1].backward_input_seconds + loss[1],
    )
    return (
        step_seconds(schedule, [host.on(cost, splits=schedule.splits) for cost in costs], host.link, cores) + host.step
    )


def stage_costs(cuts: Sequence[str], units: Sequence[UnitCost]) -> list[StageCost]:
    """What each stage costs by the profile."""
    names = [unit.name for unit in units]
    ends = [0, *(names.index(name) for name in cuts), len(units)]
    sent = [*(units[end].boundary_bytes for end in ends[1:-1]), 0]
    return [stage_cost(units[a:b], size) for (a, b), size in zip(pairwise(ends), sent, strict=True)]


def scaled(cost: StageCost, slower: float) -> StageCost:
    """A stage that takes so much longer."""
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * slower,
        backward_input_seconds=cost.backward_input_seconds * slower,
        backward_weight_seconds=cost.backward_weight_seconds * slower,
    )


def memory_errors(plan: Ran, units: Sequence[UnitCost], measured: Sequence[float]) -> list[float]:
    """For each rank predicted / measured - 1; the runs have no optimizer, so that its state is left out."""
    placement = plan.order.placement
    costs = stage_costs(plan.cuts, units)
    states = [sum(costs[stage].optimizer_bytes for stage in placement.stages_on(r)) for r in range(plan.ranks)]
    ahead = zip(plan.memory_bytes, states, measured, strict=True)
    return [(whole - state) / real - 1 for whole, state, real in ahead]


def show(found: Mapping[str, Any]) -> None:
    """Prints all tables, in Markdown."""
    host = Host(*found["2"]["host"])
    print(
        f"The runtime: {1e6 * host.action:.0f} us for each action, {1e3 * host.step:.1f} ms for each step; a message "
        f"{1e6 * host.latency:.0f} us and {host.bytes_per_second / 1e9:.1f} GB/s.\n"
    )
    if everything := [
        row
        for ranks in (2, 4)
        for model, measured in found.get(str(ranks), {}).get("models", {}).items()
        for row in rows(model, ranks, measured, host)
    ]:
        show_rows(everything)
    for model, measured in found["2"].get("spaces", {}).items():
        show_space(model, measured)


def show_memory(found: Mapping[str, Any]) -> None:
    """Prints what each rank took of memory, and the median and worst errors."""
    everything: list[float] = []
    print("| model | ranks | schedule | v | m | predicted / measured - 1, each rank |\n|---|--:|---|--:|--:|--:|")
    for ranks in (2, 4):
        for model, measured in found.get(str(ranks), {}).get("models", {}).items():
            by_rows = {one.rows: one.units for one in Profile.from_dict(measured["profile"]).each_size}
            for text, taken in zip(measured["plans"], measured["memory"], strict=True):
                plan = Ran.of(text)
                errors = memory_errors(plan, by_rows[plan.rows], taken)
                everything += errors
                said = ", ".join(f"{error:+.1%}" for error in errors)
                print(f"| {model} | {ranks} | {plan.schedule} | {plan.chunks} | {plan.microbatches} | {said} |")
    sizes, within = [abs(error) for error in everything], sum(abs(error) <= 0.1 for error in everything)
    print(
        f"\n{within} of {len(sizes)} within 10%: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}; "
        f"from {min(everything):+.1%} to {max(everything):+.1%}"
    )


def show_rows(everything: Sequence[Row]) -> None:
    """Prints each configuration, and the median and worst errors."""
    print("| model | ranks | schedule | v | m | step ms | steps | plan | rounds, bare | rounds | memory |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in everything:
        choice = row.plan
        errors = " | ".join(f"{error:+.1%}" for error in (row.plain, row.bare, row.error))
        print(
            f"| {row.model} | {row.ranks} | {choice.schedule} | {choice.chunks} | {choice.microbatches} | "
            f"{1e3 * row.seconds:.1f} | {row.count} | {errors} | {min(row.memory):+.1%} to {max(row.memory):+.1%} |"
        )
    print("\n| of | configurations | median error | worst |\n|---|--:|--:|--:|")
    for name, said in (("plain", "plan"), ("bare", "rounds, bare"), ("error", "rounds")):
        for ranks in (2, 4):
            split = {False: "whole backwards", True: "split backwards"}
            for is_split, text in split.items():
                errors = [
                    abs(getattr(row, name))
                    for row in everything
                    if row.ranks == ranks and (row.plan.schedule == "zb-h1") is is_split
                ]
                if errors:
                    print(
                        f"| {said}, {ranks} ranks, {text} | {len(errors)} | {statistics.median(errors):.1%} | "
                        f"{max(errors):.1%} |"
                    )
        errors = [abs(getattr(row, name)) for row in everything]
        print(f"| {said}, all | {len(errors)} | {statistics.median(errors):.1%} | {max(errors):.1%} |")
    memory = [abs(error) for row in everything for error in row.memory]
    print(f"| memory of a rank | {len(memory)} | {statistics.median(memory):.1%} | {max(memory):.1%} |")


def show_space(model: str, measured: Mapping[str, Any]) -> None:
    """Prints every plan of the small space, the chosen one first."""
    plans = [Ran.of(text) for text in measured["plans"]]
    walls = []
    for place in range(len(plans)):
        tried = [one[place]["step"] for one in measured["rounds"]]
        walls.append([max(took["wall"] for took in one) for one in [t for t in tried if counts(t, 2)] or tried])
    medians = [statistics.median(each) for each in walls]
    print(f"\n{model}, every plan of the small space; the planner's choice comes first\n")
    print("| schedule | v | m | rows | predicted ms | measured ms (quartiles) | of the best |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for plan, each, median in zip(plans, walls, medians, strict=True):
        low, _, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else (median, 0, median)
        choice = plan
        print(
            f"| {choice.schedule} | {choice.chunks} | {choice.microbatches} | {choice.rows} | "
            f"{1e3 * plan.step_seconds:.1f} | {1e3 * median:.1f} ({1e3 * low:.1f}, {1e3 * high:.1f}) | "
            f"{median / min(medians):.2f} |"
        )

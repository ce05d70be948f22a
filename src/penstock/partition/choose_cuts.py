"""Decides where a recording is cut: by what it says itself, by a profile or a function, or by measured times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from penstock._base.errors import ArgumentError, PartitionError
from penstock._base.formatting import pluralize
from penstock.costs import CutProblem, Profile, UnitCost, best_cuts, stage_loads
from penstock.costs.links import link_for
from penstock.costs.stage_costs import add_memory, crossing_seconds, price_stages
from penstock.partition.cut.balance import BalanceChoice
from penstock.partition.cut.candidates import (
    Candidate,
    candidates,
    check_enough,
    cut_at,
    even_starts,
    possible_units,
)
from penstock.partition.cut.names import module_at
from penstock.partition.measure.clock import measure_undisturbed
from penstock.partition.measure.measuring import measure
from penstock.partition.measure.pieces import Pieces, UnmeasurableError, compute_fingerprint
from penstock.partition.recording import Recording
from penstock.partition.stages.stage_plans import CutRecording
from penstock.simulate.costs import LinkCost, StageCost

MIN_MEASURED_WORK = 500_000_000
"""Models whose microbatch is less work than this (see `count_work`; 5 to 20 ms on a core) are not measured: their
stages take about as long as the Python around them, and the cuts stay the same from run to run."""

WORTH_MOVING = 0.98
"""Cuts by work stay if the best cuts by time make the slowest stage no faster than this fraction, so that they are the
same from run to run wherever that costs nothing."""

UNEVEN_RATIO = 1.15
"""A slowest stage above this many times the mean is reported."""


@dataclass(frozen=True, slots=True)
class ChosenCuts:
    """Where to cut, and what is known about it."""

    cuts: tuple[str, ...]
    """The units with which stages 1.. begin."""
    seconds: tuple[float, ...] = ()
    """What each stage was found to take, forward and backward; empty if that was not found out."""
    notes: tuple[str, ...] = ()
    costs: tuple[StageCost, ...] = ()
    """What a microbatch costs on each stage, by the profile that decided; otherwise empty."""
    link: LinkCost | None = None
    """What a message was taken to cost."""
    unit_seconds: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)
    """What each unit was found to take, by its name."""

    @property
    def is_uneven(self) -> bool:
        """Whether the slowest stage takes more than `UNEVEN_RATIO` times the mean."""
        return _find_slowest(self.seconds) is not None


@dataclass(frozen=True, slots=True)
class StageBudget:
    """What ranks have for their stages.

    Attributes:
        limit_bytes: a rank's memory.
        in_flight: for each stage, how many microbatches are in flight at most.
        stages: the most stages of a rank, which share its memory equally.
        microbatches: how many go through a stage in a step.
        link: what a message between two ranks costs; None: the slowest that the profile has, or as
            usual for the device.
    """

    limit_bytes: float = math.inf
    in_flight: tuple[int, ...] = ()
    stages: int = 1
    link: LinkCost | None = None
    microbatches: int = 1

    @property
    def is_limited(self) -> bool:
        return math.isfinite(self.limit_bytes)


NO_LIMIT = StageBudget()


def cut_at_best(
    recording: Recording, model: nn.Module, stages: int, choice: BalanceChoice, budget: StageBudget
) -> tuple[ChosenCuts, CutRecording]:
    """Cut a recording at the best cuts, or, if it cannot be cut at these, at the best of those that are possible.

    Raises like `_decide`.
    """

    def decide_and_cut(units: Sequence[Candidate]) -> tuple[ChosenCuts, CutRecording]:
        decision = _decide(recording, model, stages, choice, budget, units)
        return decision, cut_at(recording, model, decision.cuts)

    all_units = candidates(recording, model, choice.by, 0 if choice.kind else stages)
    try:
        return decide_and_cut(all_units)
    except PartitionError as error:
        units = possible_units(recording, model, all_units)
        if len(units) == len(all_units):
            raise
        if len(units) < stages <= len(all_units):
            raise PartitionError(
                f"{error}. For stages={stages} there is no such cut: what must stay together leaves "
                f"{pluralize(len(units), 'stage')} at most"
            ) from error
        return decide_and_cut(units)


def _decide(
    recording: Recording,
    model: nn.Module,
    stages: int,
    choice: BalanceChoice,
    budget: StageBudget,
    units: Sequence[Candidate],
) -> ChosenCuts:
    """Find the best cuts at these candidates, by what is known without running anything.

    Raises:
        PartitionError: there are fewer units than stages.
        ArgumentError: the profile is not of this model, the function returns something else, nothing fits, or memory
            counts and is unknown.
    """
    if choice.profile is not None:
        return _decide_by_profile(recording, model, stages, choice.profile, budget, units)
    if choice.kind is not None:
        units = _filter_by_class(units, model, choice)
    check_enough(recording, model, stages, choice.by, units)
    if not units:
        return ChosenCuts(())
    if choice.weight is None and not choice.memory and not budget.is_limited:
        return ChosenCuts(tuple(units[start].name for start in even_starts([u.weight for u in units], stages)[1:]))
    weights = [float(unit.weight) for unit in units]
    if choice.weight is not None:
        weights = [choice.weight_of(unit.name, module_at(model, unit.name)) for unit in units]
    problem, notes = _build_problem(recording, model, units, weights, budget, by_bytes=choice.memory)
    starts = _find_starts(problem, stages, budget)
    return ChosenCuts(tuple(units[start].name for start in starts[1:]), notes=notes)


def _build_problem(
    recording: Recording,
    model: nn.Module,
    pieces: Sequence[Candidate],
    seconds: Sequence[float],
    budget: StageBudget,
    *,
    by_bytes: bool = False,
) -> tuple[CutProblem, tuple[str, ...]]:
    """Build the problem of cutting these pieces of the model, with their memory if that matters, and notes on what does
    not count."""
    plain = CutProblem(seconds, in_flight=budget.in_flight, limit_bytes=budget.limit_bytes / budget.stages)
    if not (budget.is_limited or by_bytes):
        return plain, ()
    try:
        cut = Pieces.from_recording(recording, model, pieces)
    except UnmeasurableError as error:
        raise ArgumentError(
            f"memory_limit=, balance='memory': what units keep is unknown, since {error}; omit them, or pass cuts="
        ) from None
    sizes = cut.footprints()
    units = cut.costs(sizes)
    failed = [u.name for u, first in zip(units, cut.first_of_kind, strict=True) if isinstance(sizes[first], Exception)]
    indices = {piece.name: index for index, piece in enumerate(pieces)}
    costs = [UnitCost(piece.name, 0.0, 0.0, 0.0) for piece in pieces]  # what cannot be cut counts in the one before
    for unit in units:
        costs[indices[unit.name]] = unit
    problem = replace(add_memory(plain, costs, budget.microbatches), balanced="bytes" if by_bytes else "seconds")
    if not failed:
        return problem, ()
    return problem, (
        f"what a microbatch keeps of {pluralize(len(failed), 'unit')} ({failed[0]!r} is the first) does not count as "
        "memory: such a unit does not run on fake tensors. Leave room for it in memory_limit=",
    )


def _find_starts(problem: CutProblem, stages: int, budget: StageBudget) -> list[int]:
    try:
        return best_cuts(problem, stages)
    except ArgumentError as error:
        if budget.stages == 1:
            raise
        raise ArgumentError(f"{error} (a rank's memory is shared equally by its {budget.stages} stages)") from None


def decide_by_measuring(
    recording: Recording,
    model: nn.Module,
    by_work: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget: StageBudget = NO_LIMIT,
) -> ChosenCuts:
    """Find the best cuts by measured times; keep the cuts by work where these do as well, or nothing can be
    measured."""
    unchanged = tuple(by_work)
    if sum(fact.work for fact in recording.facts.values()) < MIN_MEASURED_WORK:
        return ChosenCuts(unchanged)
    units = candidates(recording, model, "flops", len(by_work) + 1)
    try:
        profile = measure_undisturbed(lambda: measure(recording, model, units, args, kwargs), recording.device)
    except UnmeasurableError as error:
        return ChosenCuts(unchanged, notes=(f"stages are cut by work, not by time: {error}",))
    names = [unit.name for unit in profile.units]
    if len(names) <= len(by_work):
        return ChosenCuts(unchanged)
    units = [unit for unit in units if unit.name in names]
    decision = _decide_by_times(
        recording, model, units, [[unit] for unit in profile.units], profile, budget, len(by_work) + 1, by_work
    )
    return replace(decision, notes=(*profile.notes, *decision.notes))


def _decide_by_times(
    recording: Recording,
    model: nn.Module,
    units: Sequence[Candidate],
    pieces: Sequence[Sequence[UnitCost]],
    profile: Profile,
    budget: StageBudget,
    stages: int,
    usual_cuts: Sequence[str] | None = None,
) -> ChosenCuts:
    """Find the best cuts at these units by a profile's times; keep the usual ones where these do as well.

    Args:
        pieces: for each unit, those of the profile that begin there.
    """
    names, times = [unit.name for unit in units], [sum(unit.seconds for unit in piece) for piece in pieces]
    problem, notes = _build_problem(recording, model, units, times, budget)
    link = budget.link or link_for(profile)
    problem = replace(problem, crossing_seconds=[crossing_seconds(piece[0], link) for piece in pieces])
    starts = _find_starts(problem, stages, budget)
    if usual_cuts is not None and all(name in names for name in usual_cuts):
        usual_starts = [0, *map(names.index, usual_cuts)]
        if max(stage_loads(problem, usual_starts)) * WORTH_MOVING <= max(stage_loads(problem, starts)):
            starts = usual_starts
    cuts, profile_names = tuple(names[start] for start in starts[1:]), [unit.name for unit in profile.units]
    costs = price_stages(profile.units, [0, *map(profile_names.index, cuts)], profile.action_seconds or 0.0)
    loads = tuple(stage_loads(problem, starts))
    return ChosenCuts(cuts, loads, notes, costs, link, dict(zip(names, times, strict=True)))


def _find_slowest(loads: Sequence[float]) -> tuple[int, float] | None:
    """Return the slowest stage and how many times the mean it takes; None if that is no more than `UNEVEN_RATIO`."""
    mean, slowest = sum(loads) / (len(loads) or 1), max(range(len(loads)), key=loads.__getitem__, default=0)
    return (slowest, loads[slowest] / mean) if loads and loads[slowest] > UNEVEN_RATIO * mean else None


def collect_notes(decision: ChosenCuts, work: Sequence[int]) -> tuple[str, ...]:
    """Return the notes on a split for the user: what was decided, and that it is uneven, by its stages' times, or, if
    these are unknown, by their work."""
    loads = decision.seconds or (work if sum(work) >= MIN_MEASURED_WORK else ())
    if (slowest := _find_slowest(loads)) is None:
        return decision.notes
    stage, ratio = slowest
    if not decision.seconds:
        return (
            *decision.notes,
            f"stage {stage} does {ratio:.2f}x the mean work per stage (estimated), and all others wait for it; change "
            "the cuts (cuts= or balance=; of a plan, make a new one) or the number of stages, or pass "
            "split_inside=[...]",
        )
    names = [*decision.unit_seconds]
    starts = [0, *map(names.index, decision.cuts), len(names)]
    heaviest = max(names[starts[stage] : starts[stage + 1]], key=decision.unit_seconds.__getitem__)
    remedy = "no better cut exists: change the number of stages, or pass split_inside=[...] where a module has parts"
    if (unit_ratio := decision.unit_seconds[heaviest] * len(loads) / sum(loads)) > UNEVEN_RATIO:
        remedy = (
            f"{heaviest!r} alone takes {unit_ratio:.2f} times the mean: take fewer stages, or open it (split_inside=)"
        )
    note = f"stage {stage} takes {ratio:.2f} times the mean stage time, and limits throughput; {remedy}"
    return (*decision.notes, note)


def _decide_by_profile(
    recording: Recording,
    model: nn.Module,
    stages: int,
    profile: Profile,
    budget: StageBudget,
    units: Sequence[Candidate],
) -> ChosenCuts:
    """Find the best cuts for a profile, at those of its units that are candidates here; the others join the one
    before."""
    profile.check_for(compute_fingerprint(model, recording.device.type))
    candidate_positions = {unit.name: unit.position for unit in units}
    profile, notes = _match_size(profile, recording)
    pieces: list[list[UnitCost]] = []
    for unit in profile.units:
        if unit.name in candidate_positions or not pieces:
            pieces.append([])
        pieces[-1].append(unit)
    names = [units[0].name for units in pieces]
    if stages > len(names):
        raise ArgumentError(
            f"stages={stages}: the profile has only {len(names)} units of this model at which it can be cut"
        )
    positions = [candidate_positions.get(name, 0) for name in names]
    for (before, position), (after, next_position) in pairwise(zip(names, positions, strict=True)):
        if position > next_position:
            raise ArgumentError(
                f"balance: the profile is not of this model: there {before!r} runs before {after!r}, and here after "
                "it. Make one with penstock.profile(...) or `penstock profile`, or use balance='time'"
            )
    cut_points = [Candidate(*piece, 0) for piece in zip(names, positions, strict=True)]
    decision = _decide_by_times(recording, model, cut_points, pieces, profile, budget, stages)
    if profile.source != "measured":
        notes = (f"stages are cut by an estimate for {profile.device_name}, not by measured times", *notes)
    return replace(decision, notes=(*notes, *decision.notes))


def _match_size(profile: Profile, recording: Recording) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile for microbatches like the recorded one; or as it is, with a note, if it has none."""
    metas = (recording.facts[node].meta for node in recording.inputs)
    inputs = Counter(f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}" for meta in metas if meta)
    for sized in profile.each_size:
        if not Counter(sized.inputs.values()) - inputs:
            return sized, ()
    profiled = ", ".join(f"{name} {text}" for name, text in profile.inputs.items())
    return profile, (
        f"stages are cut by times of other microbatches: the profile is of {profiled}, "
        f"and this one is {', '.join(inputs)}",
    )


def _filter_by_class(units: Sequence[Candidate], model: nn.Module, choice: BalanceChoice) -> list[Candidate]:
    """Return the candidates whose class has such a name; each counts 1."""
    assert choice.kind is not None
    classes = [type(module_at(model, unit.name)).__name__ for unit in units]
    matching = [replace(u, weight=1) for u, name in zip(units, classes, strict=True) if choice.kind.search(name)]
    if not matching:
        raise ArgumentError(
            f"balance='type:{choice.kind.pattern}': no module at which the model can be cut is of such a class; there "
            f"are {', '.join(sorted({*classes}))}"
        )
    return matching

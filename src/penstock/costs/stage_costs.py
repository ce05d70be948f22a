"""A profile's units as the stages of a pipeline: where it cuts them by itself, and what each stage then costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from penstock.costs.cuts import CutProblem, best_cuts
from penstock.costs.profile import UnitCost, kept_bytes, tied_bytes_overcount, ties_of
from penstock.simulate.costs import LinkCost, StageCost


def crossing_seconds(unit: UnitCost, link: LinkCost) -> float:
    """Return the seconds it takes to send what crosses a cut before this unit, there and back."""
    return sum(link.seconds(size) for size in (unit.boundary_bytes, unit.boundary_gradient_bytes) if size)


@lru_cache(maxsize=256)
def cut_into_stages(
    units: tuple[UnitCost, ...], stages: int, link: LinkCost, action_seconds: float = 0.0
) -> tuple[tuple[str, ...], tuple[StageCost, ...]]:
    """Cut the units where `balance="time"` does, to minimize the slowest stage: return the unit with which each stage
    but the first begins, and each stage's cost.

    Raises:
        ArgumentError: there are fewer units than stages.
    """
    starts = best_cuts(build_cut_problem(units, link), stages)
    return tuple(units[start].name for start in starts[1:]), price_stages(units, starts, action_seconds)


def build_cut_problem(units: Sequence[UnitCost], link: LinkCost, speeds: Sequence[float] = ()) -> CutProblem:
    """Build the cut problem: each unit's time, and what crosses a cut before it. `speeds`: of each stage's device."""
    return CutProblem([unit.seconds for unit in units], [crossing_seconds(unit, link) for unit in units], speeds=speeds)


def add_memory(problem: CutProblem, units: Sequence[UnitCost], microbatches: int) -> CutProblem:
    """Add the memory of units while this many microbatches of a step go through them."""
    batch_bytes = [microbatches * (unit.input_bytes + unit.target_bytes) for unit in units]
    return replace(
        problem,
        held_bytes=[unit.held_bytes + size for unit, size in zip(units, batch_bytes, strict=True)],
        activation_bytes=[unit.in_flight_bytes for unit in units],
        working_bytes=[unit.working_bytes for unit in units],
        ties=ties_of(units),
    )


def price_stages(
    units: Sequence[UnitCost], starts: Sequence[int], action_seconds: float = 0.0, speeds: Sequence[float] = ()
) -> tuple[StageCost, ...]:
    """Price each stage that begins with one of these units: the one price list of plans, simulations, searches and
    explanations.

    Args:
        units: of the whole model.
        starts: the first unit of each stage.
        action_seconds: what the runtime adds to an action of any stage.
        speeds: one per stage; empty: all 1.
    """
    pieces = [units[start:end] for start, end in pairwise([*starts, len(units)])]
    sent = [*(units[start].boundary_bytes for start in starts[1:]), 0]
    stages = zip(pieces, sent, speeds or [1.0] * len(pieces), strict=True)
    return tuple(stage_cost(*stage, action_seconds) for stage in stages)


def stage_cost(
    units: Sequence[UnitCost], output_bytes: float, speed: float = 1.0, action_seconds: float = 0.0
) -> StageCost:
    """Return the cost of consecutive units as one stage that sends this much to the next.

    Args:
        speed: of its device; 1: that of the device of the profile.
        action_seconds: what the runtime adds to F, and to B or I. A W of its own is taken to need none.
    """
    activations = kept_bytes(units)[-1]
    measured = all(unit.weight_gradient_bytes is not None for unit in units)
    waiting = sum(unit.waiting_bytes for unit in units) if measured else activations
    parameters, gradients, states = tied_bytes_overcount(units)
    return StageCost(
        sum(unit.forward_seconds for unit in units) / speed + action_seconds,
        sum(unit.input_gradient_seconds for unit in units) / speed + action_seconds,
        sum(unit.weight_gradient_seconds for unit in units) / speed,
        output_bytes=output_bytes,
        activation_bytes=activations,
        weight_gradient_bytes=waiting,
        parameter_bytes=sum(unit.parameter_bytes for unit in units) - parameters,
        gradient_bytes=sum(unit.gradient_bytes for unit in units) - gradients,
        optimizer_bytes=sum(unit.optimizer_bytes for unit in units) - states,
    )

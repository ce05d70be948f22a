"""What a plan or a profile said that stages would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from penstock.balance import Problem, Profile, best_starts
from penstock.errors import ArgumentError
from penstock.explain.schedules import Price
from penstock.plan.stage_costs import priced, problem_of, slowest_link, usual_link
from penstock.simulate import StageCost
from penstock.simulate.columns import Floats
from penstock.words import counted

_LEAST = 1e-12
_ALIKE = 1.5
"""By how much more one stage may differ from what was predicted than another, if the cuts are those of the run."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What one microbatch was predicted to take on each stage.

    Attributes:
        stage_seconds: F + I + W of each stage.
        units: the model's units by name, in order; empty if only stages are known.
        problem: F + I + W of each unit, and what cuts cost; None if only stages are known.
        costs: of each stage; empty if only its seconds are known.
        fixed_seconds: what the runtime adds to a stage, whatever its units.
        starts: the unit with which each stage begins, by its place.
        guessed: whether the starts are the profile's own best, as nobody said with which the run was cut.
        price: what splitting the stages' backwards costs, if it was measured.
        note: why it may be a prediction of something else.
    """

    stage_seconds: tuple[float, ...]
    units: tuple[str, ...] = ()
    problem: Problem | None = None
    costs: tuple[StageCost, ...] = ()
    fixed_seconds: float = 0.0
    starts: tuple[int, ...] = ()
    guessed: bool = False
    price: tuple[Price, ...] | None = None
    note: str = ""

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
    ) -> Predicted:
        """Of a profile's units in so many stages.

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
        sizes, notes = {one.rows: one for one in profile.each_size}, []
        if rows is None and len(sizes) > 1:
            notes.append(f"the run does not say how many rows a microbatch has; the profile's {profile.rows} are taken")
        elif rows and any(sizes) and rows not in sizes:
            notes.append(f"microbatches have {rows} rows, and the profile is of {', '.join(map(str, sizes))}")
        if threads not in (0, profile.threads) and profile.device == "cpu":
            notes.append(f"ranks had {counted(threads, 'thread')}, and the profile was made with {profile.threads}")
        profile = sizes.get(rows or 0, profile)
        names = [unit.name for unit in profile.units]
        units = [unit.split if splits else unit for unit in profile.units]
        problem = problem_of(units, slowest_link(profile) or usual_link(profile.device))
        if cuts is None:
            starts = best_starts(problem, stages)
        else:
            if unknown := [name for name in cuts if name not in names]:
                raise ArgumentError(f"cuts={list(cuts)}: {unknown[0]!r} is no unit of the profile")
            starts = [0, *map(names.index, cuts)]
            if len(starts) != stages or starts != sorted({*starts}):
                raise ArgumentError(
                    f"cuts={list(cuts)}: expected {stages - 1} in order, for the {stages} stages of the run"
                )
        costs, price = _costs(profile, starts, splits=splits), _price(profile, starts)
        fixed = 2 * (profile.action_seconds or 0.0)  # of F, and of B or I
        found = tuple(cost.forward_seconds + cost.backward_seconds for cost in costs)
        return cls(found, tuple(names), problem, costs, fixed, tuple(starts), cuts is None, price, "; ".join(notes))

    def unlikely(self, measured: Sequence[float]) -> bool:
        """Whether the starts are guessed, and what stages took says that they were others."""
        ratios = [took / was for took, was in zip(measured, self.stage_seconds, strict=False) if was]
        return self.guessed and bool(ratios) and max(ratios) > _ALIKE * min(ratios)

    def recut(self, measured: Sequence[float]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """The best starts, and what each stage then takes: if each unit takes as many times what was predicted as the
        stage that it is on did, and if that is due to the rank, which takes as many times for whatever it has.

        Args:
            measured: F + I + W of each stage, as it ran.
        """
        assert self.problem is not None  # or there are no units
        ends, plain = [*self.starts[1:], len(self.units)], self.problem.seconds
        times = [took / was if was else 1.0 for took, was in zip(measured, self.stage_seconds, strict=True)]
        scaled = [
            seconds * by
            for by, start, end in zip(times, self.starts, ends, strict=True)
            for seconds in plain[start:end]
        ]
        starts = best_starts(replace(self.problem, seconds=scaled), len(self.starts))
        fixed = [self.fixed_seconds * by for by in times]
        by_unit = [unit + of_rank for unit, of_rank in zip(_totals(scaled, starts), fixed, strict=True)]
        by_rank = [(unit + self.fixed_seconds) * by for unit, by in zip(_totals(plain, starts), times, strict=True)]
        return tuple(starts), tuple(by_unit), tuple(by_rank)


def _costs(profile: Profile, starts: Sequence[int], *, splits: bool) -> tuple[StageCost, ...]:
    """What each stage costs that begins with one of these units."""
    units = [unit.split if splits else unit for unit in profile.units]
    return priced(units, starts, [1.0] * len(starts), profile.action_seconds or 0.0)


def _price(profile: Profile, starts: Sequence[int]) -> tuple[Price, ...] | None:
    """What splitting the backward of each stage costs, and within which bounds; None where that was not measured."""
    if not all(unit.split_forward_seconds is not None for unit in profile.units):
        return None
    whole, split = (_costs(profile, starts, splits=splits) for splits in (False, True))

    def shares(part: str, of: str) -> Floats:
        return np.array([getattr(a, part) / max(getattr(b, of), _LEAST) for a, b in zip(split, whole, strict=True)])

    times = shares("forward_seconds", "forward_seconds")
    inputs, weights = (shares(f"backward_{part}_seconds", "backward_seconds") for part in ("input", "weight"))
    spread = np.array(_totals([unit.seconds * unit.spread for unit in profile.units], starts))
    spread /= [max(cost.forward_seconds + cost.backward_seconds, _LEAST) for cost in whole]
    best = np.maximum(1 - spread / 2, 1 / np.maximum(inputs + weights, _LEAST))  # both parts are no less than the whole
    bounds = (np.ones_like(spread), best, 1 + spread / 2)
    return tuple(Price(np.maximum(times * by, 1.0), inputs * by, weights * by) for by in bounds)


def _totals(seconds: Sequence[float], starts: Sequence[int]) -> tuple[float, ...]:
    return tuple(sum(seconds[start:end]) for start, end in pairwise([*starts, len(seconds)]))

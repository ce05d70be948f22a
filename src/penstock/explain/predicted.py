"""What a plan or a profile said that stages would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.balance import Problem, Profile, UnitCost, best_starts
from penstock.errors import ArgumentError
from penstock.explain.schedules import Price
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
        unit_seconds: F + I + W of each unit.
        starts: the unit with which each stage begins, by its place.
        guessed: whether the starts are the profile's own best, as nobody said with which the run was cut.
        price: what splitting the stages' backwards costs, if it was measured.
        note: why it may be a prediction of something else.
    """

    stage_seconds: tuple[float, ...]
    units: tuple[str, ...] = ()
    unit_seconds: tuple[float, ...] = ()
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
    ) -> Predicted:
        """Of a profile's units in so many stages.

        Args:
            profile: of the model that ran; of several sizes, that of the run's microbatches counts.
            stages: how many there are.
            cuts: the unit with which each stage but the first begins; None: where the profile itself would cut.
            rows: of a microbatch, if that is known.
            threads: of a rank, on a CPU; 0: not known.

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
        seconds = [unit.seconds for unit in profile.units]
        if cuts is None:
            starts = best_starts(Problem(seconds), stages)
        else:
            if unknown := [name for name in cuts if name not in names]:
                raise ArgumentError(f"cuts={list(cuts)}: {unknown[0]!r} is no unit of the profile")
            starts = [0, *map(names.index, cuts)]
            if len(starts) != stages or starts != sorted({*starts}):
                raise ArgumentError(
                    f"cuts={list(cuts)}: expected {stages - 1} in order, for the {stages} stages of the run"
                )
        found = _totals(seconds, starts)
        price = _price(profile, starts)
        return cls(found, tuple(names), tuple(seconds), tuple(starts), cuts is None, price, "; ".join(notes))

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
        ends = [*self.starts[1:], len(self.units)]
        times = [took / was if was else 1.0 for took, was in zip(measured, self.stage_seconds, strict=True)]
        scaled = [
            seconds * by
            for by, start, end in zip(times, self.starts, ends, strict=True)
            for seconds in self.unit_seconds[start:end]
        ]
        starts = best_starts(Problem(scaled), len(self.starts))
        plain = _totals(self.unit_seconds, starts)
        return tuple(starts), _totals(scaled, starts), tuple(a * b for a, b in zip(plain, times, strict=True))


def _price(profile: Profile, starts: Sequence[int]) -> tuple[Price, ...] | None:
    """What splitting the backward of each stage costs, and within which bounds; None where that was not measured."""
    if not all(unit.split_forward_seconds is not None for unit in profile.units):
        return None

    def of_stages(seconds: Callable[[UnitCost], float]) -> NDArray[np.float64]:
        return np.array(_totals([seconds(unit) for unit in profile.units], starts))

    forward, backward = (
        of_stages(lambda unit: unit.forward_seconds),
        of_stages(lambda unit: unit.seconds - unit.forward_seconds),
    )
    times = of_stages(lambda unit: unit.split.forward_seconds) / np.maximum(forward, _LEAST)
    inputs = of_stages(lambda unit: unit.split.input_gradient_seconds) / np.maximum(backward, _LEAST)
    weights = of_stages(lambda unit: unit.split.weight_gradient_seconds) / np.maximum(backward, _LEAST)
    spread = of_stages(lambda unit: unit.seconds * unit.spread) / np.maximum(forward + backward, _LEAST)
    best = np.maximum(1 - spread / 2, 1 / np.maximum(inputs + weights, _LEAST))  # both parts are no less than the whole
    bounds = (np.ones_like(spread), best, 1 + spread / 2)
    return tuple(Price(np.maximum(times * by, 1.0), inputs * by, weights * by) for by in bounds)


def _totals(seconds: Sequence[float], starts: Sequence[int]) -> tuple[float, ...]:
    return tuple(sum(seconds[start:end]) for start, end in pairwise([*starts, len(seconds)]))

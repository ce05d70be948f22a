"""What a plan or a profile said that stages would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.balance import Problem, Profile, best_starts
from penstock.errors import ArgumentError

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
    """

    stage_seconds: tuple[float, ...]
    units: tuple[str, ...] = ()
    unit_seconds: tuple[float, ...] = ()
    starts: tuple[int, ...] = ()
    guessed: bool = False

    @classmethod
    def of_profile(cls, profile: Profile, stages: int, cuts: Sequence[str] | None = None) -> Predicted:
        """Of a profile's units in so many stages.

        Args:
            profile: of the model that ran, for a microbatch as large.
            stages: how many there are.
            cuts: the unit with which each stage but the first begins; None: where the profile itself would cut.

        Raises:
            ArgumentError: a cut is no unit, or they are not as many as the stages need.
        """
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
        return cls(_totals(seconds, starts), tuple(names), tuple(seconds), tuple(starts), cuts is None)

    def unlikely(self, measured: Sequence[float]) -> bool:
        """Whether the starts are guessed, and what stages took says that they were others."""
        ratios = [took / was for took, was in zip(measured, self.stage_seconds, strict=False) if was]
        return self.guessed and bool(ratios) and max(ratios) > _ALIKE * min(ratios)

    def recut(self, measured: Sequence[float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The best starts, and what each stage then takes, if each unit takes as many times what was predicted as the
        stage that it is on did.

        Args:
            measured: F + I + W of each stage, as it ran.
        """
        ends = [*self.starts[1:], len(self.units)]
        scaled = [
            seconds * took / was if was else seconds
            for took, was, start, end in zip(measured, self.stage_seconds, self.starts, ends, strict=True)
            for seconds in self.unit_seconds[start:end]
        ]
        starts = best_starts(Problem(scaled), len(self.starts))
        return tuple(starts), _totals(scaled, starts)


def _totals(seconds: Sequence[float], starts: Sequence[int]) -> tuple[float, ...]:
    return tuple(sum(seconds[start:end]) for start, end in pairwise([*starts, len(seconds)]))

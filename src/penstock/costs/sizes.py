"""What a model's units cost with microbatches of another size than those that were measured, and what the numbers of a
profile say against themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.costs.costs import UnitsToCut
from penstock.costs.profile import SPLIT_SECONDS, Profile, UnitCost, amounts

GROWING = tuple(
    name for name in amounts(UnitCost) if name not in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
)
"""What depends on the number of rows. The rest is of the parameters."""

OF_SPLITS = (*SPLIT_SECONDS, "weight_gradient_bytes")
"""What is measured of split backwards."""

FARTHEST = 2
"""Up to so many times the largest measured size a line through the measurements is trusted."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Profiles of one model by the number of rows of a microbatch.

    Between two measured sizes, costs lie on a straight line; beyond them, on that of the two nearest, but below the
    smallest never under its proportion, and above the largest never under its costs. A single profile gives costs in
    proportion to the rows.

    Attributes:
        profiles: by the number of rows.
        shares_optimizer: whether the replicas of a stage share the state of its optimizer, as with ZeRO-1.

    Raises:
        ArgumentError: there is no profile, a size is less than 1, or profiles are not of the same units of one model.
    """

    profiles: Mapping[int, Profile]
    shares_optimizer: bool = False

    def __post_init__(self) -> None:
        if not self.profiles or min(self.profiles) < 1:
            raise ArgumentError("profiles: expected at least one, by the number of rows (1 or more) of its microbatch")
        first, *others = self.profiles.values()
        for other in others:
            other.check_for(first.made_for)
            if [unit.name for unit in other.units] != [unit.name for unit in first.units]:
                raise ArgumentError(
                    "profiles: they have different units; make them with the same split_inside= and leaf_modules="
                )
        object.__setattr__(self, "profiles", _split_alike(self.profiles))

    @classmethod
    def of(cls, profiles: Iterable[Profile]) -> Sizes:
        """Profiles by the rows of the microbatches that they were made with.

        Raises:
            ArgumentError: a profile does not say, or two say the same.
        """
        by_rows: dict[int, Profile] = {}
        for profile in (one for each in profiles for one in each.each_size):
            rows = rows_of(profile)
            if rows in by_rows:
                raise ArgumentError(
                    f"profiles: two are of microbatches of {counted(rows, 'row')}; pass one of each size"
                )
            by_rows[rows] = profile
        return cls(by_rows)

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units, in the order in which they run."""
        return tuple(unit.name for unit in next(iter(self.profiles.values())).units)

    @property
    def largest(self) -> int:
        """The most rows for which costs are predicted."""
        return FARTHEST * max(self.profiles)

    def shared_by(self, replicas: int) -> Sizes:
        """Divide the costs among this many replicas."""
        if not self.shares_optimizer or replicas == 1:
            return self
        found = {}
        for rows, profile in self.profiles.items():
            units = (replace(unit, optimizer_bytes=-(-unit.optimizer_bytes // replicas)) for unit in profile.units)
            found[rows] = replace(profile, units=tuple(units))
        return Sizes(found)

    def at(self, rows: int) -> tuple[UnitCost, ...]:
        """Return the cost of each unit at this microbatch size."""
        if rows in self.profiles:
            return self.profiles[rows].units
        sizes = sorted(self.profiles)
        if len(sizes) == 1:
            return tuple(_scaled(unit, rows / sizes[0]) for unit in self.profiles[sizes[0]].units)
        upper = next((i for i, size in enumerate(sizes) if size > rows and i > 0), len(sizes) - 1)
        low, high = sizes[upper - 1], sizes[upper]
        share = (rows - low) / (high - low)
        pairs = zip(self.profiles[low].units, self.profiles[high].units, strict=True)
        found = (_between(below, above, share) for below, above in pairs)
        if rows > high:
            return tuple(map(_at_least, found, self.profiles[high].units))
        if rows < low:
            parts = (_scaled(unit, rows / low) for unit in self.profiles[low].units)
            return tuple(map(_at_least, found, parts))
        return tuple(found)


def rows_of(profile: Profile) -> int:
    """Return the microbatch size that was measured; if the profile does not say, the first dimension of most inputs.

    Raises:
        ArgumentError: it has no inputs either.
    """
    if profile.rows:
        return profile.rows
    shapes = (re.search(r"\[([0-9]+)", text) for text in profile.inputs.values())
    found = Counter(int(shape[1]) for shape in shapes if shape)
    if not found:
        raise ArgumentError("profiles: one does not say with which inputs it was made; use penstock.profile(...)")
    return found.most_common(1)[0][0]


def _split_alike(profiles: Mapping[int, Profile]) -> Mapping[int, Profile]:
    """Drop the measurements of split backwards of units that not all sizes have."""

    def known(unit: UnitCost) -> list[bool]:
        return [getattr(unit, name) is not None for name in OF_SPLITS]

    nothing: dict[str, Any] = dict.fromkeys(OF_SPLITS)
    columns = []
    for units in zip(*(profile.units for profile in profiles.values()), strict=True):
        is_alike = all(known(unit) == known(units[0]) for unit in units)
        columns.append(units if is_alike else [replace(unit, **nothing) for unit in units])
    each = zip(profiles.items(), zip(*columns, strict=True), strict=True)
    return {rows: replace(profile, units=units) for (rows, profile), units in each}


def _growing(unit: UnitCost) -> dict[str, Any]:
    """Return the fields that depend on the microbatch size, by name."""
    known = {name: getattr(unit, name) for name in GROWING} | {"recompute_seconds": unit.again_seconds}
    if unit.weight_gradient_bytes is None:  # stays unknown
        del known["weight_gradient_bytes"]
    return known | {name: getattr(unit.split, name.removeprefix("split_")) for name in SPLIT_SECONDS}


def _scaled(unit: UnitCost, factor: float) -> UnitCost:
    return replace(unit, **{name: value * factor for name, value in _growing(unit).items()})


def _between(low: UnitCost, high: UnitCost, share: float) -> UnitCost:
    """Interpolate on the line through two costs; never below zero."""
    above = _growing(high)
    return replace(low, **{name: max(0.0, a + share * (above[name] - a)) for name, a in _growing(low).items()})


def _at_least(unit: UnitCost, least: UnitCost) -> UnitCost:
    lowest = _growing(least)
    return replace(unit, **{name: max(value, lowest[name]) for name, value in _growing(unit).items()})


BUSY = 0.25
"""Times that spread by more than this part of their median were not measured on a quiet machine."""
_RATIO, _SECONDS = 2.0, 1e-3
"""A forward does much the same where backwards are split: it does not take twice as long and a millisecond."""


def doubts(profile: Profile) -> tuple[str, ...]:
    """Why not to trust the times of a profile; empty if nothing speaks against them, or if none were measured."""
    if profile.source != "measured":
        return ()
    found, sizes = [], profile.each_size
    if (varies := variation(profile)) > BUSY:
        found.append(f"times vary by {varies:.0%} from run to run; measure again while the machine does nothing else")
    for size in sizes:
        plain = sum(unit.forward_seconds for unit in size.units)
        split = sum(unit.split.forward_seconds for unit in size.units)
        if max(plain, split) > _RATIO * min(plain, split) + _SECONDS:
            found.append(
                f"forwards of {counted(size.rows, 'row')} took {split * 1e3:.3g} ms where backwards are split, and "
                f"{plain * 1e3:.3g} ms otherwise: something else ran; measure again"
            )
    for smaller, larger in pairwise(sizes):
        if _seconds(larger) < _seconds(smaller):
            found.append(
                f"microbatches of {counted(larger.rows, 'row')} took less time than those of {smaller.rows}: something "
                "else ran; measure again"
            )
    return tuple(found)


def _seconds(size: Profile) -> float:
    return sum(unit.seconds for unit in size.units)


def variation(profile: Profile) -> float:
    """Return the run-to-run variation of the profile's times, as a fraction: the largest over its sizes, weighting
    units by time."""
    totals = [(_seconds(size), sum(unit.seconds * unit.spread for unit in size.units)) for size in profile.each_size]
    return max(spread / seconds if seconds else 0.0 for seconds, spread in totals)


def units_of(profile: Profile, rows: int | None, source: str) -> UnitsToCut:
    """Return the units of a profile at this microbatch size; None: at the size it was measured with. Raise
    ArgumentError if the profile does not say which size that is, or it is far smaller."""
    units, size = profile.units, ", ".join(profile.inputs.values())
    if rows is not None:
        sizes = Sizes.of([profile])
        if not 1 <= rows <= sizes.largest:
            measured = ", ".join(map(str, sorted(sizes.profiles)))
            raise ArgumentError(
                f"--microbatch-size {rows}: {source} has microbatches of {measured} rows, "
                f"which cover 1 to {sizes.largest}; measure others: penstock profile --microbatch-sizes"
            )
        units, size = sizes.at(rows), counted(rows, "row")
        if rows not in sizes.profiles:
            how = "between" if min(sizes.profiles) < rows < max(sizes.profiles) else "beyond"
            size += f" ({how} those measured: {', '.join(map(str, sorted(sizes.profiles)))})"
    elif profile.rows:
        size = counted(profile.rows, "row")
    made = "measured" if profile.source == "measured" else "an estimate"
    where = f"{source.removeprefix('--profile ')}, {made} on {profile.device_name or profile.device}"
    return UnitsToCut(units, profile.action_seconds or 0.0, f"{where}, microbatches of {size}")

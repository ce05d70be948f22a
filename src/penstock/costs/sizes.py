"""What a model's units cost with microbatches of other sizes than those measured, and warnings on a profile's
quality."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.costs.costs import UnitsToCut
from penstock.costs.profile import SPLIT_SECONDS, Profile, UnitCost, quantity_fields

SIZE_DEPENDENT = tuple(
    name for name in quantity_fields(UnitCost) if name not in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
)
"""Fields that depend on the number of rows; the others depend on the parameters."""

SPLIT_FIELDS = (*SPLIT_SECONDS, "weight_gradient_bytes")
"""Fields that are measured with split backwards."""

MAX_EXTRAPOLATION = 2
"""Sizes up to this multiple of the largest measured one are extrapolated linearly."""


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
        first, *remaining = self.profiles.values()
        for profile in remaining:
            profile.check_for(first.made_for)
            if [unit.name for unit in profile.units] != [unit.name for unit in first.units]:
                raise ArgumentError(
                    "profiles: they have different units; make them with the same split_inside= and leaf_modules="
                )
        object.__setattr__(self, "profiles", _drop_partial_splits(self.profiles))

    @classmethod
    def of(cls, profiles: Iterable[Profile]) -> Sizes:
        """Profiles by the rows of the microbatches that they were made with.

        Raises:
            ArgumentError: a profile has no size, or two have the same.
        """
        by_rows: dict[int, Profile] = {}
        for profile in (size for measured in profiles for size in measured.each_size):
            rows = measured_rows(profile)
            if rows in by_rows:
                raise ArgumentError(
                    f"profiles: two are of microbatches of {pluralize(rows, 'row')}; pass one of each size"
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
        return MAX_EXTRAPOLATION * max(self.profiles)

    def shared_by(self, replicas: int) -> Sizes:
        """Divide the costs among this many replicas."""
        if not self.shares_optimizer or replicas == 1:
            return self
        shared = {}
        for rows, profile in self.profiles.items():
            units = (replace(unit, optimizer_bytes=-(-unit.optimizer_bytes // replicas)) for unit in profile.units)
            shared[rows] = replace(profile, units=tuple(units))
        return Sizes(shared)

    def at(self, rows: int) -> tuple[UnitCost, ...]:
        """Return the cost of each unit at this microbatch size."""
        if rows in self.profiles:
            return self.profiles[rows].units
        sizes = sorted(self.profiles)
        if len(sizes) == 1:
            return tuple(_scale(unit, rows / sizes[0]) for unit in self.profiles[sizes[0]].units)
        upper = next((i for i, size in enumerate(sizes) if size > rows and i > 0), len(sizes) - 1)
        low, high = sizes[upper - 1], sizes[upper]
        fraction = (rows - low) / (high - low)
        pairs = zip(self.profiles[low].units, self.profiles[high].units, strict=True)
        interpolated = (_interpolate(below, above, fraction) for below, above in pairs)
        if rows > high:
            return tuple(map(_raise_to, interpolated, self.profiles[high].units))
        if rows < low:
            proportional = (_scale(unit, rows / low) for unit in self.profiles[low].units)
            return tuple(map(_raise_to, interpolated, proportional))
        return tuple(interpolated)

    def extrapolation_note(self, rows: int) -> str:
        """Return a note on a plan whose microbatch size is outside the measured ones; empty if it is not."""
        measured = sorted(self.profiles)
        if measured[0] <= rows <= measured[-1]:
            return ""
        covered = f"{measured[0]} to {measured[-1]}" if len(measured) > 1 else str(measured[0])
        sizes_to_add = ",".join(map(str, sorted({rows, *measured})))
        smaller = ", and small microbatches usually take longer" if rows < measured[0] else ""
        return (
            f"the best plan has microbatches of {pluralize(rows, 'sample')}, but the profile only of {covered}: times "
            f"are extrapolated{smaller}; add --microbatch-sizes {sizes_to_add} to `penstock profile` to be sure"
        )


def measured_rows(profile: Profile) -> int:
    """Return the microbatch size that was measured; if the profile does not say, the first dimension of most inputs.

    Raises:
        ArgumentError: it has no inputs either.
    """
    if profile.rows:
        return profile.rows
    shapes = (re.search(r"\[([0-9]+)", text) for text in profile.inputs.values())
    counts = Counter(int(shape[1]) for shape in shapes if shape)
    if not counts:
        raise ArgumentError("profiles: one has neither rows nor inputs; make it with penstock.profile(...)")
    return counts.most_common(1)[0][0]


def _drop_partial_splits(profiles: Mapping[int, Profile]) -> Mapping[int, Profile]:
    """Drop the measurements of split backwards of units that not all sizes have."""

    def measured(unit: UnitCost) -> list[bool]:
        return [getattr(unit, name) is not None for name in SPLIT_FIELDS]

    cleared: dict[str, Any] = dict.fromkeys(SPLIT_FIELDS)
    columns = []
    for units in zip(*(profile.units for profile in profiles.values()), strict=True):
        is_alike = all(measured(unit) == measured(units[0]) for unit in units)
        columns.append(units if is_alike else [replace(unit, **cleared) for unit in units])
    pairs = zip(profiles.items(), zip(*columns, strict=True), strict=True)
    return {rows: replace(profile, units=units) for (rows, profile), units in pairs}


def _by_size(unit: UnitCost) -> dict[str, Any]:
    """Return the fields that depend on the microbatch size, by name."""
    values = {name: getattr(unit, name) for name in SIZE_DEPENDENT} | {"recompute_seconds": unit.again_seconds}
    if unit.weight_gradient_bytes is None:  # stays unknown
        del values["weight_gradient_bytes"]
    return values | {name: getattr(unit.split, name.removeprefix("split_")) for name in SPLIT_SECONDS}


def _scale(unit: UnitCost, factor: float) -> UnitCost:
    return replace(unit, **{name: value * factor for name, value in _by_size(unit).items()})


def _interpolate(low: UnitCost, high: UnitCost, fraction: float) -> UnitCost:
    """Interpolate on the line through two costs; never below zero."""
    lower, upper = _by_size(low), _by_size(high)
    return replace(low, **{name: max(0.0, value + fraction * (upper[name] - value)) for name, value in lower.items()})


def _raise_to(unit: UnitCost, floor: UnitCost) -> UnitCost:
    minimum = _by_size(floor)
    return replace(unit, **{name: max(value, minimum[name]) for name, value in _by_size(unit).items()})


MAX_VARIATION = 0.25
"""Times that vary by more than this fraction of their median were not measured on an idle machine."""
_SPLIT_RATIO, _SPLIT_SLACK = 2.0, 1e-3
"""A forward takes about as long where backwards are split: not twice as long plus a millisecond."""


def quality_warnings(profile: Profile) -> tuple[str, ...]:
    """Why not to trust the times of a profile; empty if nothing speaks against them, or if none were measured."""
    if profile.source != "measured":
        return ()
    warnings, sizes = [], profile.each_size
    if (fraction := variation(profile)) > MAX_VARIATION:
        warnings.append(f"times vary by {fraction:.0%} from run to run; measure again on an idle machine")
    for size in sizes:
        plain = sum(unit.forward_seconds for unit in size.units)
        split = sum(unit.split.forward_seconds for unit in size.units)
        if max(plain, split) > _SPLIT_RATIO * min(plain, split) + _SPLIT_SLACK:
            warnings.append(
                f"forwards of {pluralize(size.rows, 'row')} took {split * 1e3:.3g} ms where backwards are split, and "
                f"{plain * 1e3:.3g} ms otherwise: something else ran; measure again"
            )
    for smaller, larger in pairwise(sizes):
        if _seconds(larger) < _seconds(smaller):
            warnings.append(
                f"microbatches of {pluralize(larger.rows, 'row')} took less time than those of {smaller.rows}: "
                "something else ran; measure again"
            )
    return tuple(warnings)


def profile_notes(profiles: Sequence[Profile]) -> list[str]:
    """Return the notes of profiles and the warnings on their quality, each once."""
    warnings = (note for profile in profiles for note in quality_warnings(profile))
    return [*dict.fromkeys((*(note for profile in profiles for note in profile.notes), *warnings))]


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
        units, size = sizes.at(rows), pluralize(rows, "row")
        if rows not in sizes.profiles:
            relation = "between" if min(sizes.profiles) < rows < max(sizes.profiles) else "beyond"
            size += f" ({relation} those measured: {', '.join(map(str, sorted(sizes.profiles)))})"
    elif profile.rows:
        size = pluralize(profile.rows, "row")
    method = "measured" if profile.source == "measured" else "an estimate"
    origin = f"{source.removeprefix('--profile ')}, {method} on {profile.device_name or profile.device}"
    return UnitsToCut(units, profile.action_seconds or 0.0, f"{origin}, microbatches of {size}")

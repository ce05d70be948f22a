"""A model's units, measured or estimated, cut into as many stages as a schedule has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock._base.errors import ArgumentError
from penstock._base.words import counted

if TYPE_CHECKING:
    from penstock.costs.profile import Profile, UnitCost


@dataclass(frozen=True, slots=True)
class UnitsToCut:
    """The units of a model for one microbatch, which become the stages of any schedule.

    Attributes:
        units: in the order in which they run.
        action_seconds: what the runtime adds to each forward and backward of a stage.
        said: where they come from, with the microbatch and the device, for people.
    """

    units: tuple[UnitCost, ...]
    action_seconds: float
    said: str


def units_of(profile: Profile, rows: int | None, source: str) -> UnitsToCut:
    """The units of a profile for microbatches of that many rows; None: of those that it is of. Raises ArgumentError: it
    does not say how many rows it is of, or they are far fewer."""
    units, size = profile.units, ", ".join(profile.inputs.values())
    if rows is not None:
        from penstock.costs.sizes import Sizes

        sizes = Sizes.of([profile])
        if not 1 <= rows <= sizes.largest:
            measured = ", ".join(map(str, sorted(sizes.profiles)))
            raise ArgumentError(
                f"--rows {rows}: {source} has microbatches of {measured} rows, which tell of 1 to {sizes.largest}; "
                "measure others: penstock profile --microbatch-sizes"
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

"""Estimates of what units take on a device that is not here, from what they do and what the device can do at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.costs.hardware import (
    DEFAULT_EFFICIENCY,
    DeviceSpec,
    Efficiency,
    Measurement,
    Operation,
    calibrate,
    device_by_reported_name,
    seconds_of,
)
from penstock.costs.profile import OPTIMIZER_VALUES, OpCounts, Profile, UnitCost

_MOVED = 7
"""Values that AdamW reads or writes for each that is trained: it and its state, there and back, and the gradient."""


def estimate(counted: Profile, device: DeviceSpec, efficiency: Efficiency = DEFAULT_EFFICIENCY) -> Profile:
    """Return the profile with all times estimated for this device, at all its sizes. Bytes stay as they are.

    Raises:
        ArgumentError: the profile has no operations, or the device no peak for a dtype of theirs.
    """
    sizes = [replace(size, units=_estimate_units(size.units, device, efficiency), runs=0) for size in counted.others]
    return replace(
        counted,
        units=_estimate_units(counted.units, device, efficiency),
        others=tuple(sizes),
        device=device.type,
        device_name=device.name,
        source="estimate",
        runs=0,
        links=(),
        optimizer_byte_seconds=_MOVED / OPTIMIZER_VALUES / (device.bytes_per_second * efficiency.bandwidth_efficiency),
        notes=(*counted.notes, f"not measured: an estimate from {device.name}'s specifications: {efficiency.text}"),
    )


def fit_efficiency(measured: Iterable[Profile], device: DeviceSpec) -> Efficiency:
    """Fit the constants with which estimates are closest to what these profiles measured on devices of this kind.

    Raises:
        ArgumentError: a profile is an estimate itself, is of another kind of device, or has no operations.
    """
    measurements: list[Measurement] = []
    for profile in measured:
        name, reported = profile.device_name or profile.device, device_by_reported_name(profile.device_name)
        if profile.source != "measured":
            raise ArgumentError(f"calibrate: the profile of {name} is an estimate itself; pass a measured one")
        if profile.device != device.type or (reported is not None and device.sources and reported.key != device.key):
            raise ArgumentError(
                f"calibrate: the profile was measured on {name} ({profile.device}), not on {device.name} "
                f"({device.type}); measure on one, or describe that device in a .toml file of its own"
            )
        for size in profile.each_size:
            measurements += _measurements(size.units)
    return calibrate(measurements, device, DEFAULT_EFFICIENCY)


def _estimate_units(units: Sequence[UnitCost], device: DeviceSpec, efficiency: Efficiency) -> tuple[UnitCost, ...]:
    times: dict[str, dict[str, Any]] = {}
    for unit in units:
        if not unit.like or unit.operations is not None:
            times[unit.name] = _estimate_seconds(_require_operations(unit), device, efficiency)
    return tuple(replace(u, **times[u.like or u.name], recompute_seconds=None, spread=0.0) for u in units)


def _estimate_seconds(counts: OpCounts, device: DeviceSpec, efficiency: Efficiency) -> dict[str, float]:
    """F, I and W: what the whole backward takes besides I."""

    def seconds(operations: Sequence[Operation]) -> float:
        return seconds_of(operations, device, efficiency) + efficiency.run_seconds if operations else 0.0

    forward, backward = seconds(counts.forward) or efficiency.run_seconds, seconds(counts.backward)
    inputs = min(seconds(counts.input_gradient), backward)
    return {
        "forward_seconds": forward,
        "input_gradient_seconds": inputs,
        "weight_gradient_seconds": backward - inputs,
    }


def _measurements(units: Sequence[UnitCost]) -> list[Measurement]:
    """Return what each kind of unit did in its forward, its backward and the I part of it, and how long that took."""
    measured = []
    for unit in units:
        if unit.like:
            continue
        counts = _require_operations(unit)
        backward = unit.input_gradient_seconds + unit.weight_gradient_seconds
        pairs = [(counts.forward, unit.forward_seconds), (counts.backward, backward)]
        if unit.weight_gradient_seconds:
            pairs.append((counts.input_gradient, unit.input_gradient_seconds))
        measured += [Measurement(operations, seconds) for operations, seconds in pairs if operations and seconds > 0]
    return measured


def _require_operations(unit: UnitCost) -> OpCounts:
    if unit.operations is None:
        raise ArgumentError(
            f"unit {unit.name!r}: the profile has its times but no operations to estimate from; make a new one "
            "with penstock.profile(...) or `penstock profile`"
        )
    return unit.operations

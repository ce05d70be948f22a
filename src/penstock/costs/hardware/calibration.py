"""Fits the few constants of a roofline to measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock.costs.hardware.roofline import DEFAULT_EFFICIENCY, Efficiency, Operation
from penstock.costs.hardware.specs import DeviceSpec

LIKELY = np.array([0.3, 0.3, 0.2, 1.0])
"""How far constants usually are from where a fit starts, in the units below. A measurement that is off by `MISFIT` of
its logarithm weighs as much as a constant that is off by this: few measurements hardly move what they do not tell."""

MISFIT = 0.1
"""How far estimates usually are from measurements, until there are more of these than constants, which then tell."""

LEAST_MISFIT = 1e-3

_SCALE = 1e-4
"""Seconds are sought in units of this, fractions as logarithms, so that all steps are of a like size."""

_HIGH = np.array([-math.log(1e-3), -math.log(1e-3), 1e-3 / _SCALE, 1e-3 / _SCALE])
"""A thousandth of a peak, and a millisecond for a launch, and for a run."""

_TINY = 1e-12
"""Of what only makes views, nothing is estimated."""

_ROUNDS = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Operations that ran one after another in one forward or backward, and what they took.

    Raises:
        ArgumentError: there are no operations, or no time.
    """

    operations: Sequence[Operation]
    seconds: float

    def __post_init__(self) -> None:
        if not self.operations:
            raise ArgumentError("a measurement: expected at least one operation")
        if not 0 < self.seconds < math.inf:
            raise ArgumentError(f"a measurement: seconds={self.seconds!r}; expected a time above 0")


def calibrate(
    measurements: Iterable[Measurement], device: DeviceSpec, start: Efficiency = DEFAULT_EFFICIENCY
) -> Efficiency:
    """Fit the constants with which the estimates of these operations are closest to their times.

    Least squares of the logarithms of estimate / measured, so that short operations count as much as long ones, by
    Levenberg's and Marquardt's method. With no measurement: `start`.

    Raises:
        ArgumentError: a product has a dtype for which the device has no peak.
    """
    given = [*measurements]
    if not given:
        return start
    wrong, spare = _wrong(given, device), len(given) - len(LIKELY)
    logarithms = -math.log(start.matmul_efficiency), -math.log(start.bandwidth_efficiency)
    first = np.clip([*logarithms, start.launch_seconds / _SCALE, start.run_seconds / _SCALE], 0.0, _HIGH)
    misfit = MISFIT
    if spare > 0:
        freely, _ = wrong(_fit(wrong, first, LEAST_MISFIT / LIKELY))
        misfit = max(LEAST_MISFIT, math.sqrt(freely @ freely / spare))
    best = _fit(wrong, first, misfit / LIKELY)
    product, bandwidth, launch, run = (float(one) for one in best)
    error = float(np.median(np.abs(np.exp(wrong(best)[0]) - 1)))
    return Efficiency(math.exp(-product), math.exp(-bandwidth), launch * _SCALE, len(given), error, run * _SCALE)


_Wrong = Callable[[Floats], tuple[Floats, Floats]]
"""By how much the logarithm of each estimate is wrong with these constants, and its slopes by each of them."""


def _wrong(given: Sequence[Measurement], device: DeviceSpec) -> _Wrong:
    columns = []
    for one in given:
        products = [op.count * op.flops / device.peak(op.dtype) if op.flops else 0.0 for op in one.operations]
        moved = [op.count * op.bytes / device.bytes_per_second for op in one.operations]
        columns.append((np.array(products), np.array(moved), _SCALE * sum(op.count for op in one.operations)))
    logarithms = np.log([one.seconds for one in given])

    def wrong(at: Floats) -> tuple[Floats, Floats]:
        rows = []
        for products, moved, launches in columns:
            product, memory = products * math.exp(at[0]), moved * math.exp(at[1])
            bound = product >= memory
            rows.append([product[bound].sum(), memory[~bound].sum(), launches, _SCALE])
        parts = np.array(rows)
        estimates = parts[:, :2].sum(axis=1) + parts[:, 2:] @ at[2:] + _TINY
        return np.log(estimates) - logarithms, parts / estimates[:, None]

    return wrong


def _fit(wrong: _Wrong, first: Floats, pull: Floats) -> Floats:
    """Return the least-squares constants, starting from `first`, which they are pulled towards."""

    def errors_at(at: Floats) -> tuple[Floats, Floats]:
        errors, slopes = wrong(at)
        return np.concatenate([errors, pull * (at - first)]), np.concatenate([slopes, np.diag(pull)])

    best, (errors, slopes), damping = first, errors_at(first), 1e-2
    for _ in range(_ROUNDS):
        towards = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(first)), -slopes.T @ errors)
        tried = np.clip(best + towards, 0.0, _HIGH)
        found, its_slopes = errors_at(tried)
        if found @ found >= errors @ errors:
            damping *= 4
            if damping > 1e9:
                break
            continue
        moved = float(np.abs(tried - best).max())
        best, errors, slopes, damping = tried, found, its_slopes, damping / 3
        if moved < 1e-9:
            break
    return best

"""Fits the few constants of a roofline to measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock.costs.hardware.device_spec import DeviceSpec
from penstock.costs.hardware.roofline import DEFAULT_EFFICIENCY, Efficiency, Operation

PRIOR_WIDTHS = np.array([0.3, 0.3, 0.2, 1.0])
"""How far constants usually are from where a fit starts, in the units below. A measurement that is off by `MISFIT` of
its logarithm weighs as much as a constant that is off by this: few measurements hardly move other constants."""

MISFIT = 0.1
"""How far estimates usually are from measurements; fitted if there are more measurements than constants."""

MIN_MISFIT = 1e-3

_SCALE = 1e-4
"""Seconds are fitted in units of this, fractions as logarithms, so that all steps have similar sizes."""

_UPPER_BOUNDS = np.array([-math.log(1e-3), -math.log(1e-3), 1e-3 / _SCALE, 1e-3 / _SCALE])
"""A thousandth of a peak, and a millisecond for a launch, and for a run."""

_TINY = 1e-12
"""Keeps the logarithm finite where operations only make views."""

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
    samples = [*measurements]
    if not samples:
        return start
    log_errors, degrees_of_freedom = _build_log_errors(samples, device), len(samples) - len(PRIOR_WIDTHS)
    logarithms = -math.log(start.matmul_efficiency), -math.log(start.bandwidth_efficiency)
    initial = np.clip([*logarithms, start.launch_seconds / _SCALE, start.run_seconds / _SCALE], 0.0, _UPPER_BOUNDS)
    misfit = MISFIT
    if degrees_of_freedom > 0:
        residuals, _ = log_errors(_fit(log_errors, initial, MIN_MISFIT / PRIOR_WIDTHS))
        misfit = max(MIN_MISFIT, math.sqrt(residuals @ residuals / degrees_of_freedom))
    best = _fit(log_errors, initial, misfit / PRIOR_WIDTHS)
    product, bandwidth, launch, run = (float(constant) for constant in best)
    error = float(np.median(np.abs(np.exp(log_errors(best)[0]) - 1)))
    return Efficiency(math.exp(-product), math.exp(-bandwidth), launch * _SCALE, len(samples), error, run * _SCALE)


_LogErrors = Callable[[Floats], tuple[Floats, Floats]]
"""The error of the logarithm of each estimate with these constants, and its slope by each of them."""


def _build_log_errors(measurements: Sequence[Measurement], device: DeviceSpec) -> _LogErrors:
    columns = []
    for measurement in measurements:
        products = [op.count * op.flops / device.peak(op.dtype) if op.flops else 0.0 for op in measurement.operations]
        moved = [op.count * op.bytes / device.bytes_per_second for op in measurement.operations]
        columns.append((np.array(products), np.array(moved), _SCALE * sum(op.count for op in measurement.operations)))
    logarithms = np.log([measurement.seconds for measurement in measurements])

    def log_errors(constants: Floats) -> tuple[Floats, Floats]:
        rows = []
        for products, moved, launches in columns:
            product, memory = products * math.exp(constants[0]), moved * math.exp(constants[1])
            bound = product >= memory
            rows.append([product[bound].sum(), memory[~bound].sum(), launches, _SCALE])
        parts = np.array(rows)
        estimates = parts[:, :2].sum(axis=1) + parts[:, 2:] @ constants[2:] + _TINY
        return np.log(estimates) - logarithms, parts / estimates[:, None]

    return log_errors


def _fit(log_errors: _LogErrors, initial: Floats, pull: Floats) -> Floats:
    """Return the least-squares constants, starting from `first`, which they are pulled towards."""

    def errors_at(constants: Floats) -> tuple[Floats, Floats]:
        errors, slopes = log_errors(constants)
        return np.concatenate([errors, pull * (constants - initial)]), np.concatenate([slopes, np.diag(pull)])

    best, (errors, slopes), damping = initial, errors_at(initial), 1e-2
    for _ in range(_ROUNDS):
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(initial)), -slopes.T @ errors)
        candidate = np.clip(best + step, 0.0, _UPPER_BOUNDS)
        candidate_errors, candidate_slopes = errors_at(candidate)
        if candidate_errors @ candidate_errors >= errors @ errors:
            damping *= 4
            if damping > 1e9:
                break
            continue
        moved = float(np.abs(candidate - best).max())
        best, errors, slopes, damping = candidate, candidate_errors, candidate_slopes, damping / 3
        if moved < 1e-9:
            break
    return best

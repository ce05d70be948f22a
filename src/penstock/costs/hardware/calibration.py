"""Fits the few constants of a roofline to measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock.costs.hardware.roofline import USUAL, Efficiency, Operation
from penstock.costs.hardware.specs import Device

LIKELY = np.array([0.3, 0.3, 0.2, 1.0])
"""How far constants usually are from where a fit starts, in the units below. A measurement that is off by `MISFIT` of
its logarithm weighs as much as a constant that is off by this: few measurements hardly move what they do not tell."""

MISFIT = 0.1
"""How far estimates usually are from measurements, until there are more of these than constants, which then tell."""

LEAST_MISFIT = 1e-3

LEAST_FRACTION = 1e-3
MAX_SECONDS = 1e-3
"""Of a launch, and of a run."""

_SCALE = 1e-4
"""Seconds are sought in units of this, fractions as logarithms, so that all steps are of a like size."""

_LOW = np.zeros(4)
_HIGH = np.array([-math.log(LEAST_FRACTION), -math.log(LEAST_FRACTION), MAX_SECONDS / _SCALE, MAX_SECONDS / _SCALE])

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


def calibrated(measurements: Iterable[Measurement], device: Device, start: Efficiency = USUAL) -> Efficiency:
    """The constants with which the estimates of these operations are closest to what they took.

    Least squares of the logarithms of estimate / measured, so that short operations count as much as long ones, by
    Levenberg's and Marquardt's method. With no measurement: `start`.

    Raises:
        ArgumentError: a product has a dtype for which the device has no peak.
    """
    given = [_Sums.of(each, device) for each in measurements]
    if not given:
        return start
    first = np.clip(_position(start), _LOW, _HIGH)
    misfit, spare = MISFIT, len(given) - len(first)
    if spare > 0:
        freely = _residuals(given, _fit(given, first, LEAST_MISFIT / LIKELY), first, np.zeros(4))
        misfit = max(LEAST_MISFIT, math.sqrt(freely @ freely / spare))
    best = _fit(given, first, misfit / LIKELY)
    errors = _residuals(given, best, first, np.zeros(4))
    product, bandwidth, launch, run = (float(one) for one in best)
    ratios = np.exp(errors[: len(given)])
    error = float(np.median(np.abs(ratios - 1)))
    return Efficiency(math.exp(-product), math.exp(-bandwidth), launch * _SCALE, len(given), error, run * _SCALE)


def _fit(given: Sequence[_Sums], first: Floats, pull: Floats) -> Floats:
    """The constants with the least squares, from `first` on, to which they are drawn."""
    best, errors, damping = first, _residuals(given, first, first, pull), 1e-2
    for _ in range(_ROUNDS):
        slopes = _slopes(given, best, pull)
        towards = np.linalg.solve(slopes.T @ slopes + damping * np.eye(4), -slopes.T @ errors)
        tried = np.clip(best + towards, _LOW, _HIGH)
        found = _residuals(given, tried, first, pull)
        if found @ found < errors @ errors:
            moved = float(np.abs(tried - best).max())
            best, errors, damping = tried, found, damping / 3
            if moved < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return best


@dataclass(frozen=True, slots=True)
class _Sums:
    """A measurement as columns: what each operation takes at the peaks."""

    product: Floats
    moved: Floats
    kernels: int
    seconds: float

    @classmethod
    def of(cls, given: Measurement, device: Device) -> _Sums:
        return cls(
            np.array([op.count * op.flops / device.peak(op.dtype) if op.flops else 0.0 for op in given.operations]),
            np.array([op.count * op.bytes / device.bytes_per_second for op in given.operations]),
            sum(op.count for op in given.operations),
            given.seconds,
        )

    def parts(self, at: Floats) -> Floats:
        """What products, memory, launches and the run itself take of the estimate."""
        product, moved = self.product * math.exp(at[0]), self.moved * math.exp(at[1])
        bound = product >= moved
        return np.array([product[bound].sum(), moved[~bound].sum(), self.kernels * at[2] * _SCALE, at[3] * _SCALE])


def _position(given: Efficiency) -> Floats:
    """Where constants are among those that are sought."""
    seconds = given.launch_seconds / _SCALE, given.run_seconds / _SCALE
    return np.array([-math.log(given.product_fraction), -math.log(given.bandwidth_fraction), *seconds])


def _residuals(given: Sequence[_Sums], at: Floats, first: Floats, pull: Floats) -> Floats:
    tiny = 1e-12  # of what only makes views, nothing is estimated
    estimates = [math.log((each.parts(at).sum() + tiny) / each.seconds) for each in given]
    return np.array([*estimates, *(pull * (at - first))])


def _slopes(given: Sequence[_Sums], at: Floats, pull: Floats) -> Floats:
    """Of the residuals, by what is sought."""
    rows = []
    for each in given:
        parts = each.parts(at)
        by = [parts[0], parts[1], each.kernels * _SCALE, _SCALE]
        rows.append(np.array(by) / (parts.sum() + 1e-12))
    return np.array([*rows, *np.diag(pull)])

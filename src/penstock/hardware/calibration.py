"""Fits the few constants of a roofline to measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArgumentError
from penstock.hardware.roofline import USUAL, Efficiency, Operation
from penstock.hardware.specs import Device

PULL = 1e-4
"""How much a constant is drawn to where the fit starts, in squared logarithms, as a part of a measurement's weight: one
that no measurement tells stays there, and one that they tell hardly moves."""

LEAST_FRACTION = 1e-3
LAUNCH_SECONDS = (1e-8, 1e-3)
"""Between these a constant is sought."""

_ROUNDS = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Operations that ran one after another, and what they took.

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
    low = np.log([1.0, 1.0, LAUNCH_SECONDS[0]])
    high = np.log([1 / LEAST_FRACTION, 1 / LEAST_FRACTION, LAUNCH_SECONDS[1]])
    first = np.clip(np.log(_slowness(start)), low, high)
    best, errors = first, _residuals(given, first, first)
    damping = 1e-2
    for _ in range(_ROUNDS):
        slopes = _slopes(given, best)
        towards = np.linalg.solve(slopes.T @ slopes + damping * np.eye(3), -slopes.T @ errors)
        tried = np.clip(best + towards, low, high)
        found = _residuals(given, tried, first)
        if found @ found < errors @ errors:
            moved = float(np.abs(tried - best).max())
            best, errors, damping = tried, found, damping / 3
            if moved < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    constants = np.exp(best)
    ratios = np.exp(errors[: len(given)])
    return Efficiency(
        float(min(1.0, 1 / constants[0])),
        float(min(1.0, 1 / constants[1])),
        float(constants[2]),
        len(given),
        float(np.median(np.abs(ratios - 1))),
    )


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

    def parts(self, constants: Floats) -> Floats:
        """What products, memory and launches take of the estimate, at these multiples of the least times."""
        product, moved = self.product * constants[0], self.moved * constants[1]
        bound = product >= moved
        return np.array([product[bound].sum(), moved[~bound].sum(), self.kernels * constants[2]])


def _slowness(given: Efficiency) -> list[float]:
    return [1 / given.product_fraction, 1 / given.bandwidth_fraction, max(given.launch_seconds, LAUNCH_SECONDS[0])]


def _residuals(given: Sequence[_Sums], logs: Floats, first: Floats) -> Floats:
    constants = np.exp(logs)
    estimates = [math.log(each.parts(constants).sum() / each.seconds) for each in given]
    return np.array([*estimates, *(math.sqrt(PULL) * (logs - first))])


def _slopes(given: Sequence[_Sums], logs: Floats) -> Floats:
    """Of the residuals, by the logarithms of the constants."""
    constants = np.exp(logs)
    rows = [parts / parts.sum() for parts in (each.parts(constants) for each in given)]
    return np.array([*rows, *(math.sqrt(PULL) * np.eye(3))])

"""How long operations take on a device: as long as its products or its memory allow, at the fractions that are reached.

seconds = launch + max(flops / (fraction * peak), bytes / (fraction * bandwidth)), Williams et al., "Roofline", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT
from penstock._base.formatting import pluralize
from penstock.costs.hardware.device_spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class Operation:
    """What one kernel does.

    Attributes:
        flops: additions and multiplications of its matrix product; 0 for all that is no product.
        bytes: what it reads and writes.
        dtype: of the product's factors.
        count: how often it runs.

    Raises:
        ArgumentError: a number is below 0 or not finite.
    """

    __pydantic_config__ = STRICT
    flops: float
    bytes: float
    dtype: str = "float32"
    count: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.flops < math.inf and 0 <= self.bytes < math.inf and self.count >= 0):
            raise ArgumentError(f"{self}: expected numbers of 0 or more")


@accept_old_names(product_fraction="matmul_efficiency", bandwidth_fraction="bandwidth_efficiency")
@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a device's peaks is reached.

    Attributes:
        matmul_efficiency: of the peak, by matrix products.
        bandwidth_efficiency: of the memory's bandwidth.
        launch_seconds: what each kernel takes besides.
        measurements: to how many it was fitted; 0: to none.
        error: the median of |estimate / measured - 1| over these.
        run_seconds: what a forward or a backward of a unit takes besides its kernels: its Python, the autograd engine.

    Raises:
        ArgumentError: a fraction is not above 0 and at most 1, or a time is not 0 or more.
    """

    matmul_efficiency: float
    bandwidth_efficiency: float
    launch_seconds: float
    measurements: int = 0
    error: float = 0.0
    run_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("matmul_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: expected a fraction, above 0 and at most 1")
        for name in ("launch_seconds", "run_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: expected 0 or more")

    @property
    def text(self) -> str:
        """The constants in words, and where they are from."""
        origin = "round figures, not fitted"
        if self.measurements:
            origin = f"fitted to {pluralize(self.measurements, 'measurement')} (median error {self.error:.1%})"
        run = f" and {1e6 * self.run_seconds:.3g} us per run" if self.run_seconds else ""
        return (
            f"{self.matmul_efficiency:.0%} of the peak, {self.bandwidth_efficiency:.0%} of the bandwidth, "
            f"{1e6 * self.launch_seconds:.3g} us per kernel{run}, {origin}"
        )


DEFAULT_EFFICIENCY = Efficiency(0.7, 0.8, 4e-6)
"""Round figures, without any measurement. Large products reach 60 to 80% of the dense peak, streaming kernels 75 to 90%
of the bandwidth, and the host launches a kernel in a few microseconds. Whole training steps, which also wait and
communicate, reach less: 44 to 52% on A100 (Narayanan et al. 2021, table 1), 38 to 43% on H100 (Llama 3, 2024, table 4).
"""


def operation_seconds(operation: Operation, device: DeviceSpec, efficiency: Efficiency = DEFAULT_EFFICIENCY) -> float:
    """Return the seconds of an operation, all its runs together.

    Raises:
        ArgumentError: the device has no peak for the product's dtype.
    """
    matmul_seconds = (
        operation.flops / (device.peak(operation.dtype) * efficiency.matmul_efficiency) if operation.flops else 0.0
    )
    memory_seconds = operation.bytes / (device.bytes_per_second * efficiency.bandwidth_efficiency)
    return operation.count * (efficiency.launch_seconds + max(matmul_seconds, memory_seconds))


def seconds_of(
    operations: Iterable[Operation], device: DeviceSpec, efficiency: Efficiency = DEFAULT_EFFICIENCY
) -> float:
    """Return the seconds of operations that run one after another."""
    return math.fsum(operation_seconds(operation, device, efficiency) for operation in operations)

"""What work costs: the numbers that turn a schedule into a timeline. Seconds and bytes, nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from penstock.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on one stage, and what the stage holds.

    Attributes:
        forward_seconds: F.
        backward_input_seconds: I, the gradient of the stage's inputs.
        backward_weight_seconds: W, the gradient of its parameters.
        output_bytes: what goes to the next stage; the gradient that comes back is as large.
        activation_bytes: what a microbatch keeps on the stage from F's start on, until its backward has ended.
        weight_gradient_bytes: the part of `activation_bytes` that W needs: where the backward is split, the rest is
            free when I ends, and this when W does.
        parameter_bytes, gradient_bytes, optimizer_bytes: what the stage holds all the time.
        overlapped_seconds: F together with the backward of another microbatch, where a schedule lets them overlap;
            None: as long as one after the other.

    Raises:
        ArgumentError: a cost is negative or not finite, or W needs more activations than there are.
    """

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    output_bytes: float = 0
    activation_bytes: float = 0
    weight_gradient_bytes: float = 0
    parameter_bytes: float = 0
    gradient_bytes: float = 0
    optimizer_bytes: float = 0
    overlapped_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < math.inf:
                raise ArgumentError(f"{field.name}={value}: expected a cost of 0 or more")
        if self.weight_gradient_bytes > self.activation_bytes:
            raise ArgumentError(
                f"weight_gradient_bytes={self.weight_gradient_bytes} of activation_bytes={self.activation_bytes}: "
                "what W needs is a part of what F keeps; give no more than that"
            )

    @property
    def backward_seconds(self) -> float:
        """B = I + W."""
        return self.backward_input_seconds + self.backward_weight_seconds


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a message between two ranks costs.

    Raises:
        ArgumentError: the latency is negative or not finite, or the bandwidth is not positive.
    """

    latency_seconds: float
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.latency_seconds < math.inf:
            raise ArgumentError(f"latency_seconds={self.latency_seconds}: expected a latency of 0 or more")
        if not self.bytes_per_second > 0:
            raise ArgumentError(f"bytes_per_second={self.bytes_per_second}: expected a bandwidth above 0")

    def seconds(self, message_bytes: float) -> float:
        """From the send of a message until it has arrived."""
        return self.latency_seconds + message_bytes / self.bytes_per_second

"""What parts of a model take on a machine: F, I and W of one microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.hardware import seconds_of
from penstock.transformer.job import Recompute
from penstock.transformer.machine import Machine
from penstock.transformer.operations import Work


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one microbatch: F, I and W, and what runs again before I."""

    forward: float
    input_gradient: float
    weight_gradient: float
    again: float


def times_of(work: Work, machine: Machine, devices: int, recompute: Recompute = "none") -> Times:
    """What a part takes on each device of a tensor-parallel group. Collectives do not overlap with anything.

    Args:
        work: of one device.
        machine: whose devices they are.
        devices: of the group.
        recompute: what runs again before the input's gradient; the part's collectives do too if that is all.
    """
    device, efficiency = machine.device, machine.efficiency
    forward = seconds_of(work.forward, device, efficiency) + _sums(work.forward_sums, machine, devices)
    inputs = seconds_of(work.input_gradient, device, efficiency) + _sums(work.backward_sums, machine, devices)
    weights = seconds_of(work.weight_gradient, device, efficiency)
    repeated = seconds_of(work.repeated, device, efficiency)
    again = {"none": 0.0, "selective": repeated, "full": forward}[recompute]
    return Times(forward, inputs, weights, again)


def _sums(sizes: Sequence[float], machine: Machine, devices: int) -> float:
    return math.fsum(machine.all_reduce_seconds(size, devices) for size in sizes)

"""A job as units that `penstock.plan` cuts: the embedding, each layer, and the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.balance import Profile, UnitCost
from penstock.hardware import seconds_of
from penstock.transformer import memory, operations
from penstock.transformer.job import Job, Recompute
from penstock.transformer.machine import Machine
from penstock.transformer.memory import Held
from penstock.transformer.operations import Work

EMBEDDING, HEAD = "embedding", "head"


def units_of(job: Job, machine: Machine, rows: int) -> tuple[UnitCost, ...]:
    """What each unit costs one device of a tensor-parallel group, for a microbatch of so many rows."""
    boundary = round(memory.boundary_bytes(job, rows))
    first = _unit(EMBEDDING, operations.embedding_work(job, rows), memory.embedding_held(job, rows), job, machine, 0)
    layer = operations.layer_work(job, rows, machine.grid), memory.layer_held(job, rows), job, machine, boundary
    head = operations.head_work(job, rows, machine.grid), memory.head_held(job, rows), job, machine, boundary
    layers = [_unit(layer_name(number), *layer) for number in range(job.model.layers)]
    return (first, *layers, _unit(HEAD, *head))


def layer_name(number: int) -> str:
    """Of a layer's unit, from 0."""
    return f"layers.{number}"


def profile_of(job: Job, machine: Machine, rows: int) -> Profile:
    """The estimate as a profile. A "device" of it is a whole tensor-parallel group, whose members do the same."""
    model, efficiency = job.model, machine.efficiency
    shapes = {EMBEDDING: (model.embedding,), HEAD: (model.output + model.last_norm,)}
    shapes |= {layer_name(number): (model.layer_matrices + model.layer_vectors,) for number in range(model.layers)}
    return Profile(
        units_of(job, machine, rows),
        device=machine.device.key,
        dtype=job.dtype,
        parameters=shapes,
        device_name=machine.device.name,
        inputs={"tokens": f"int64[{rows}, {job.sequence}]"},
        rows=rows,
        source="estimate",
        notes=(
            f"from {machine.device.name}'s specifications: {efficiency.text}; {machine.link_fraction:.0%} of its "
            f"links, {machine.network_fraction:.0%} of its network; each device is {job.tensor_parallel} that share "
            "every layer",
        ),
    )


def _unit(name: str, work: Work, held: Held, job: Job, machine: Machine, boundary: int) -> UnitCost:
    recompute = job.recompute if name not in (EMBEDDING, HEAD) else "none"
    times = times_of(work, machine, job.tensor_parallel, recompute)
    return UnitCost(
        name,
        times.forward,
        times.input_gradient + times.again,
        times.weight_gradient,
        round(held.activations),
        round(held.parameters),
        round(held.gradients),
        round(held.optimizer),
        boundary,
        boundary,
        recompute_seconds=times.forward - times.again,
        working_bytes=held.working,
    )


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

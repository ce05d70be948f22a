"""A job as units that `penstock.plan` cuts: the embedding, each layer, and the output."""

from __future__ import annotations

import math

from penstock.costs import Profile, UnitCost
from penstock.costs.hardware import seconds_of
from penstock.plan.transformer import memory, operations
from penstock.plan.transformer.job import Job
from penstock.plan.transformer.machine import Machine
from penstock.plan.transformer.memory import Held
from penstock.plan.transformer.operations import Work

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
    """On each device of a tensor-parallel group. Collectives do not overlap with anything; if everything runs again
    before the input's gradient, they do too."""
    recompute = job.recompute if name not in (EMBEDDING, HEAD) else "none"
    forward, inputs, weights, repeated = (
        seconds_of(operations, machine.device, machine.efficiency)
        for operations in (work.forward, work.input_gradient, work.weight_gradient, work.repeated)
    )
    sums, back = (
        math.fsum(machine.all_reduce_seconds(size, job.tensor_parallel) for size in sizes)
        for sizes in (work.forward_sums, work.backward_sums)
    )
    forward += sums
    again = {"none": 0.0, "selective": repeated, "full": forward}[recompute]
    return UnitCost(
        name,
        forward,
        inputs + back + again,
        weights,
        round(held.activations),
        round(held.parameters),
        round(held.gradients),
        round(held.optimizer),
        boundary,
        boundary,
        recompute_seconds=forward - again,
        working_bytes=held.working,
    )

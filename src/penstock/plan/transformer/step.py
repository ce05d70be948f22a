"""A job without hardware: its units as `penstock.plan` cuts them, a step of a known layout, and a job to be planned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.costs import Profile, UnitCost
from penstock.costs.hardware import seconds_of
from penstock.costs.stage_costs import price_stages
from penstock.plan import Cluster, Plan, Sizes
from penstock.plan.activation_policy import Transient, transient_by_rank
from penstock.plan.transformer import memory, operations
from penstock.plan.transformer.job import (
    GRADIENT_BYTES,
    LINK_FRACTION,
    OPTIMIZER_BYTES,
    PARAMETER_BYTES,
    ClusterSpec,
    TrainingConfig,
)
from penstock.plan.transformer.memory import UnitMemory
from penstock.plan.transformer.operations import Work
from penstock.schedule import generate
from penstock.simulate import peaks, simulate

EMBEDDING, _LAYER, HEAD = "embedding", "layers.{}", "head"


def units_of(job: TrainingConfig, machine: ClusterSpec, rows: int) -> tuple[UnitCost, ...]:
    """Return the cost of each unit on one device of a tensor-parallel group, for a microbatch of this size."""
    boundary, processors = round(memory.boundary_bytes(job, rows)), machine.device.processors
    first = _cost(job, machine, EMBEDDING, operations.embedding_work(job, rows), memory.embedding_memory(job, rows), 0)
    layer = operations.layer_work(job, rows, processors), memory.layer_memory(job, rows), boundary
    head = operations.head_work(job, rows, processors), memory.head_memory(job, rows), boundary
    layers = (_cost(job, machine, _LAYER.format(number), *layer) for number in range(job.model.layers))
    return (first, *layers, _cost(job, machine, HEAD, *head))


def profile_of(job: TrainingConfig, machine: ClusterSpec, rows: int) -> Profile:
    """Return the estimate as a profile. Its "device" is a whole tensor-parallel group, whose members do the same."""
    model, efficiency = job.model, machine.efficiency
    shapes = {EMBEDDING: (model.embedding,), HEAD: (model.output + model.final_norm,)}
    shapes |= {_LAYER.format(number): (model.layer_matrices + model.layer_vectors,) for number in range(model.layers)}
    return Profile(
        units_of(job, machine, rows),
        device=machine.device.key,
        dtype=job.dtype,
        parameters=shapes,
        device_name=machine.device.name,
        inputs={"tokens": f"int64[{rows}, {job.seq_length}]"},
        rows=rows,
        source="estimate",
        notes=(
            f"from {machine.device.name}'s specifications: {efficiency.text}; {LINK_FRACTION:.0%} of its "
            f"links, {machine.network_fraction:.0%} of its network; each device is {job.tensor_parallel} that share "
            "every layer",
        ),
    )


def _cost(
    job: TrainingConfig, machine: ClusterSpec, name: str, work: Work, usage: UnitMemory, boundary: int
) -> UnitCost:
    """Return the cost of a unit on each device of a tensor-parallel group. Collectives do not overlap with anything; if
    everything is recomputed before the input's gradient, they are, too."""
    recompute = job.recompute if name not in (EMBEDDING, HEAD) else "none"
    forward, inputs, weights, selective = (
        seconds_of(operations, machine.device, machine.efficiency)
        for operations in (work.forward, work.input_gradient, work.weight_gradient, work.recomputed)
    )
    forward_reduce, backward_reduce = (
        math.fsum(machine.all_reduce_seconds(size, job.tensor_parallel) for size in sizes)
        for sizes in (work.forward_reduces, work.backward_reduces)
    )
    forward += forward_reduce
    in_backward = {"none": 0.0, "selective": selective, "full": forward}[recompute]
    return UnitCost(
        name,
        forward,
        inputs + backward_reduce + in_backward,
        weights,
        round(usage.activations),
        round(usage.parameters),
        round(usage.gradients),
        round(usage.optimizer),
        boundary,
        boundary,
        recompute_seconds=forward - in_backward,
        working_bytes=usage.working,
    )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a job's devices are used.

    Attributes:
        replicas, ranks: dp and pp; each rank is a tensor-parallel group.
        chunks: stages a rank; with more than one, the schedule is interleaved 1F1B.
        rows: of a microbatch.
        microbatches: of each replica.
        layers: of each stage; empty: as even as can be, the later ones with more.
    """

    replicas: int
    ranks: int
    microbatches: int
    rows: int = 1
    chunks: int = 1
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step is predicted to take.

    Attributes:
        pipeline_seconds: from the first forward to the last backward.
        reduce_seconds: the sums of gradients over replicas after it, and with a sharded optimizer the gathering of
            parameters.
        optimizer_seconds: reading and writing each parameter's state.
        memory_bytes: the most that each rank's devices need, while something runs on them.
        activation_bytes: the most that activations take of it, on each rank.
    """

    pipeline_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    memory_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.pipeline_seconds + self.reduce_seconds + self.optimizer_seconds


def predict_step(job: TrainingConfig, machine: ClusterSpec, layout: ParallelLayout) -> StepEstimate:
    """Predict a step of 1F1B (interleaved, if ranks have several stages).

    Raises:
        ArgumentError: the layers of the stages are not those of the model, or the schedule does not exist.
    """
    units = units_of(job, machine, layout.rows)
    layers = _layers(job, layout)
    bounds = [0, *(end + 1 for end in [*accumulate(layers)][:-1]), len(units)]
    stages = price_stages(units, bounds[:-1])
    schedule = generate(
        "interleaved-1f1b" if layout.chunks > 1 else "1f1b", layout.ranks, layout.microbatches, layout.chunks
    )
    # Replicas lie between two ranks, so that a host has one rank only, unless there is but one host.
    in_host = job.tensor_parallel * layout.replicas * layout.ranks <= machine.devices_per_host
    timeline = simulate(schedule, stages, machine.link if in_host else machine.network)
    usage = peaks(schedule, stages, timeline)
    parameters = max(peak.parameters for peak in usage) / PARAMETER_BYTES
    pieces = [units[start:end] for start, end in pairwise(bounds)]
    transients = transient_by_rank(schedule.placement, layout.microbatches, [Transient.from_units(p) for p in pieces])
    return StepEstimate(
        timeline.makespan_seconds,
        # replicas are neighbors once tensor-parallel groups are taken
        machine.all_reduce_seconds(parameters * PARAMETER_BYTES, layout.replicas, stride=job.tensor_parallel),
        optimizer_seconds(job, machine, parameters),
        tuple(peak.at_once + transient.working for peak, transient in zip(usage, transients, strict=True)),
        tuple(peak.activations for peak in usage),
    )


def optimizer_seconds(job: TrainingConfig, machine: ClusterSpec, parameters: float) -> float:
    """Return the seconds of Adam, which reads and writes parameters, reads gradients, and reads and writes its state,
    all for its own shard."""
    moved = (2 * PARAMETER_BYTES + GRADIENT_BYTES + 2 * OPTIMIZER_BYTES) / job.optimizer_shards
    return parameters * moved / (machine.device.bytes_per_second * machine.efficiency.bandwidth_efficiency)


def _layers(job: TrainingConfig, layout: ParallelLayout) -> tuple[int, ...]:
    stages, layers = layout.ranks * layout.chunks, job.model.layers
    if layout.layers:
        if len(layout.layers) != stages or sum(layout.layers) != layers:
            raise ArgumentError(f"layers={layout.layers}: expected {stages} numbers that add up to {layers}")
        return layout.layers
    if stages > layers + 2:
        raise ArgumentError(f"{stages} stages for {layers} layers: pass fewer ranks or chunks")
    return tuple(layers * (k + 1) // stages - layers * k // stages for k in range(stages))


SIZES = (1, 2, 4, 8)
"""Microbatch sizes to estimate. Estimates cost nothing, so each size has its own."""


@dataclass(frozen=True, slots=True)
class AnalyticJob:
    """A job that is planned from numbers alone, without hardware."""

    job: TrainingConfig
    machine: ClusterSpec
    devices: int
    memory_bytes: float
    shares_optimizer: bool = False

    def sizes(self) -> Sizes:
        """Return the cost of its layers, by microbatch size."""
        return Sizes({rows: profile_of(self.job, self.machine, rows) for rows in SIZES}, self.shares_optimizer)

    def cluster(self) -> Cluster:
        """Groups of devices that share every layer, each as one device."""
        machine, group_size = self.machine, self.job.tensor_parallel
        groups, in_host = self.devices // group_size, max(1, machine.devices_per_host // group_size)
        memory_bytes = self.memory_bytes if self.memory_bytes < math.inf else machine.device.memory_bytes
        link = machine.link if in_host > 1 else machine.network
        update = optimizer_seconds(self.job, machine, 1.0) * self.job.optimizer_shards / OPTIMIZER_BYTES
        if in_host == 1 or groups <= in_host:
            return Cluster(groups, memory_bytes, link, optimizer_byte_seconds=update)
        return Cluster(groups, memory_bytes, link, in_host, machine.network, optimizer_byte_seconds=update)

    def describe(self, best: Plan) -> str:
        """Explain what the numbers of a table of plans mean here, and what each device computes."""
        job, choice = self.job, best.choice
        rows = choice.replicas * choice.microbatches * choice.rows
        flops = job.model.flops(rows * job.seq_length, job.seq_length) / best.step_seconds / self.devices
        share = flops / self.machine.device.peak(job.dtype)
        origin = profile_of(job, self.machine, 1).notes[0]
        lines: tuple[str, ...] = (
            f"An estimate {origin}.",
            f"{job.model.parameters:,} parameters. dp and pp count groups of "
            f"{pluralize(job.tensor_parallel, 'device')}. The first: {flops / 1e12:.0f} TFLOP/s per device, "
            f"{share:.0%} of its peak, of the model's own operations: 6 per parameter of a matrix and token and those "
            "of attention, without recomputation.",
        )
        if job.optimizer_shards > choice.replicas:
            lines += (
                f"Its memory is too low: {pluralize(choice.replicas, 'replica')} cannot share the optimizer's state "
                f"{job.optimizer_shards} ways. Pass --optimizer-shards {choice.replicas} or fewer.",
            )
        return "\n".join(lines)

"""A whole step of training: the pipeline by the simulator, the sums over replicas, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock._base.errors import ArgumentError
from penstock.costs.stage_costs import priced
from penstock.plan.transformer.job import GRADIENT_BYTES, OPTIMIZER_BYTES, PARAMETER_BYTES, Job
from penstock.plan.transformer.machine import Machine
from penstock.plan.transformer.memory import dummies
from penstock.plan.transformer.units import units_of
from penstock.plan.transient import Transient, transient_of_ranks
from penstock.schedule import generate
from penstock.simulate import LinkCost, peaks, simulate


@dataclass(frozen=True, slots=True)
class Layout:
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
class Step:
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


def predict_step(job: Job, machine: Machine, layout: Layout) -> Step:
    """A step of 1F1B (interleaved, if ranks have several stages).

    Raises:
        ArgumentError: the layers of the stages are not those of the model, or the schedule does not exist.
    """
    units = units_of(job, machine, layout.rows)
    layers = _layers(job, layout)
    bounds = [0, *(end + 1 for end in [*accumulate(layers)][:-1]), len(units)]
    stages = priced(units, bounds[:-1])
    schedule = generate(
        "interleaved-1f1b" if layout.chunks > 1 else "1f1b", layout.ranks, layout.microbatches, layout.chunks
    )
    timeline = simulate(schedule, stages, _neighbors(job, machine, layout))
    held = peaks(schedule, stages, timeline)
    parameters = max(one.parameters for one in held) / PARAMETER_BYTES
    pieces = [units[start:end] for start, end in pairwise(bounds)]
    running = transient_of_ranks(schedule.placement, layout.microbatches, [Transient.of(piece) for piece in pieces])
    unread = [
        dummies(job, layers=any(layers[stage] for stage in own), head=len(layers) - 1 in own)
        for own in schedule.placement.by_rank
    ]
    return Step(
        timeline.makespan_seconds,
        # replicas are neighbors once tensor-parallel groups are taken
        machine.all_reduce_seconds(parameters * PARAMETER_BYTES, layout.replicas, stride=job.tensor_parallel),
        optimizer_seconds(job, machine, parameters),
        tuple(most.at_once + one.working + more for most, one, more in zip(held, running, unread, strict=True)),
        tuple(one.activations for one in held),
    )


def optimizer_seconds(job: Job, machine: Machine, parameters: float) -> float:
    """Adam reads and writes parameters, reads gradients, and reads and writes its state, all for its own shard."""
    moved = (2 * PARAMETER_BYTES + GRADIENT_BYTES + 2 * OPTIMIZER_BYTES) / job.optimizer_shards
    return parameters * moved / (machine.device.bytes_per_second * machine.efficiency.bandwidth_fraction)


def _neighbors(job: Job, machine: Machine, layout: Layout) -> LinkCost:
    """Between two ranks: replicas lie between them, so that a host has one rank only, unless there is but one host."""
    devices = job.tensor_parallel * layout.replicas * layout.ranks
    return machine.link if devices <= machine.devices_per_host else machine.network


def _layers(job: Job, layout: Layout) -> tuple[int, ...]:
    stages, layers = layout.ranks * layout.chunks, job.model.layers
    if layout.layers:
        if len(layout.layers) != stages or sum(layout.layers) != layers:
            raise ArgumentError(f"layers={layout.layers}: expected {stages} numbers that add up to {layers}")
        return layout.layers
    if stages > layers + 2:
        raise ArgumentError(f"{stages} stages for {layers} layers: pass fewer ranks or chunks")
    return tuple(layers * (k + 1) // stages - layers * k // stages for k in range(stages))

"""A job on paper, as `penstock.plan` takes it: what its layers cost, and its devices in tensor-parallel groups."""

from __future__ import annotations

from dataclasses import dataclass

from penstock._base.words import counted
from penstock.plan import Cluster, Plan, Sizes
from penstock.plan.transformer.job import OPTIMIZER_BYTES, Job
from penstock.plan.transformer.machine import Machine
from penstock.plan.transformer.step import optimizer_seconds
from penstock.plan.transformer.units import profile_of

ROWS = (1, 2, 4, 8)
"""Of microbatches. Estimates cost nothing, so each size has its own."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A job on paper."""

    job: Job
    machine: Machine
    devices: int
    memory_bytes: float
    shares_optimizer: bool = False

    def sizes(self) -> Sizes:
        """What its layers cost, by the rows of a microbatch."""
        return Sizes({rows: profile_of(self.job, self.machine, rows) for rows in ROWS}, self.shares_optimizer)

    def cluster(self) -> Cluster:
        """Groups of devices that share every layer, each as one device."""
        machine, shared = self.machine, self.job.tensor_parallel
        groups, in_host = self.devices // shared, max(1, machine.devices_per_host // shared)
        memory = min(self.memory_bytes, machine.device.memory_bytes)
        link = machine.link if in_host > 1 else machine.network
        update = optimizer_seconds(self.job, machine, 1.0) * self.job.optimizer_shards / OPTIMIZER_BYTES
        if in_host == 1 or groups <= in_host:
            return Cluster(groups, memory, link, optimizer_byte_seconds=update)
        return Cluster(groups, memory, link, in_host, machine.network, optimizer_byte_seconds=update)

    def told(self, best: Plan) -> str:
        """What the numbers of a table of plans mean here, and what each device computes."""
        job, choice = self.job, best.choice
        rows = choice.replicas * choice.microbatches * choice.rows
        flops = job.model.flops(rows * job.sequence, job.sequence) / best.step_seconds / self.devices
        share = flops / self.machine.device.peak(job.dtype)
        origin = profile_of(job, self.machine, 1).notes[0]
        said: tuple[str, ...] = (
            f"An estimate {origin}.",
            f"{job.model.parameters:,} parameters. dp and pp count groups of {counted(job.tensor_parallel, 'device')}. "
            f"The first: {flops / 1e12:.0f} TFLOP/s a device, {share:.0%} of its peak, of the model's own operations: "
            "6 per parameter of a matrix and token and those of attention, none computed again.",
        )
        if job.optimizer_shards > choice.replicas:
            said += (
                f"Its memory is too low: {counted(choice.replicas, 'replica')} cannot share the optimizer's state "
                f"{job.optimizer_shards} ways. Pass --optimizer-shards {choice.replicas} or fewer.",
            )
        return "\n".join(said)

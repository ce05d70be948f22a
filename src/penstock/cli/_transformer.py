"""Options of `penstock plan` for a model that is only numbers yet, on device specifications."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from penstock.cli._options import options_on
from penstock.errors import ArgumentError
from penstock.words import counted

if TYPE_CHECKING:
    from penstock.hardware import Device
    from penstock.plan import Cluster, Plan, Sizes
    from penstock.transformer import Job, Machine

WITH_REPLICAS = "dp"
"""For --optimizer-shards: as many as a plan has replicas."""

ROWS = (1, 2, 4, 8)
"""Of microbatches. Estimates cost nothing, so each size has its own."""


_option = options_on("A transformer on paper")


@dataclass(frozen=True, slots=True)
class TransformerOptions:
    """A transformer and how layers are shared among devices."""

    transformer: Annotated[
        str | None,
        _option(
            "Instead of TARGET: a name (gpt3-175b, llama3-70b, llama3-405b) or numbers: "
            "layers=126,hidden=16384,heads=128,kv-heads=8,ffn=53248,vocabulary=128256,style=llama."
        ),
    ] = None
    sequence: Annotated[int, _option("Tokens of a row.")] = 4096
    tensor_parallel: Annotated[int, _option("Tensor-parallel size (with sequence parallelism).")] = 1
    optimizer_shards: Annotated[
        str, _option("Replicas that share the optimizer's state, as with ZeRO-1; dp: all that a plan has.")
    ] = "1"

    def check_unused(self) -> None:
        """Refuses what only a transformer on paper can be asked for. Raises ArgumentError: names it."""
        for each in fields(self):
            if getattr(self, each.name) != each.default:
                given = f"--{each.name.replace('_', '-')} {getattr(self, each.name)} requires --transformer"
                whole = "; layers of a measured model stay whole" if each.name == "tensor_parallel" else ""
                raise ArgumentError(f"{given}{whole}; omit it")

    def read(self, cluster: Cluster, per_host: int | None, kind: Device | None) -> Paper:
        """The job, on these devices; `kind`: whose specifications to estimate with.

        Raises:
            ArgumentError: an option is wrong, no device is named, or links are given, which its specifications
                state.
        """
        from penstock.transformer import Job, Machine, transformer

        if cluster.link.bytes_per_second != float("inf") or cluster.between_hosts is not None:
            raise ArgumentError("--link and --between-hosts are not for --transformer: the --device states its links")
        model, shared = transformer(str(self.transformer)), self.tensor_parallel
        if kind is None:
            raise ArgumentError("--transformer needs --device: what to estimate for, as in --device h100")
        known = kind
        job = Job(model, self.sequence, shared, shared > 1, fused_attention=True, optimizer_shards=self._shards())
        hosts = per_host or (known.link.devices if known.link else 1) or 1
        if cluster.devices % shared:
            raise ArgumentError(
                f"--devices {cluster.devices} is not a multiple of --tensor-parallel {shared}: pass "
                f"{max(1, cluster.devices // shared) * shared}"
            )
        shares = self.optimizer_shards == WITH_REPLICAS
        return Paper(job, Machine(known, devices_per_host=hosts), cluster.devices, cluster.memory_bytes, shares)

    def _shards(self) -> int:
        """The fixed number; 1 if plans decide."""
        if self.optimizer_shards == WITH_REPLICAS:
            return 1
        if not self.optimizer_shards.isdecimal():
            raise ArgumentError(f"--optimizer-shards {self.optimizer_shards!r}: expected a number, or {WITH_REPLICAS}")
        return int(self.optimizer_shards)


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
        from penstock.plan import Sizes
        from penstock.transformer import profile_of

        return Sizes({rows: profile_of(self.job, self.machine, rows) for rows in ROWS}, self.shares_optimizer)

    def cluster(self) -> Cluster:
        """Groups of devices that share every layer, each as one device."""
        from penstock.plan import Cluster
        from penstock.simulate import LinkCost
        from penstock.transformer.job import OPTIMIZER_BYTES
        from penstock.transformer.step import optimizer_seconds

        machine, shared = self.machine, self.job.tensor_parallel
        groups, in_host = self.devices // shared, max(1, machine.devices_per_host // shared)
        memory = min(self.memory_bytes, machine.device.memory_bytes)
        near = machine.link if in_host > 1 else machine.network
        link = LinkCost(near.latency_seconds, near.bytes_per_second)
        update = optimizer_seconds(self.job, machine, 1.0) * self.job.optimizer_shards / OPTIMIZER_BYTES
        if in_host == 1 or groups <= in_host:
            return Cluster(groups, memory, link, optimizer_byte_seconds=update)
        far = LinkCost(machine.network.latency_seconds, machine.network.bytes_per_second)
        return Cluster(groups, memory, link, in_host, far, optimizer_byte_seconds=update)

    def told(self, best: Plan) -> str:
        """What the numbers of a table of plans mean here, and what each device computes."""
        from penstock.transformer import profile_of

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

"""Options of `penstock plan` for a model that is only numbers yet, on device specifications."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from penstock._base.errors import ArgumentError
from penstock.cli._options import options_on

if TYPE_CHECKING:
    from penstock.costs.hardware import Device
    from penstock.plan import Cluster
    from penstock.plan.transformer.step import Paper

WITH_REPLICAS = "dp"
"""For --optimizer-shards: as many as a plan has replicas."""

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
        from penstock.plan.transformer import Job, Machine, transformer
        from penstock.plan.transformer.step import Paper

        if cluster.link.bytes_per_second != float("inf") or cluster.between_hosts is not None:
            raise ArgumentError("--link and --between-hosts are not for --transformer: the --device states its links")
        model, shared = transformer(str(self.transformer)), self.tensor_parallel
        if kind is None:
            raise ArgumentError("--transformer needs --device: what to estimate for, as in --device h100")
        job = Job(model, self.sequence, shared, shared > 1, fused_attention=True, optimizer_shards=self._shards())
        hosts = per_host or (kind.link.devices if kind.link else 1) or 1
        if cluster.devices % shared:
            raise ArgumentError(
                f"--devices {cluster.devices} is not a multiple of --tensor-parallel {shared}: pass "
                f"{max(1, cluster.devices // shared) * shared}"
            )
        shares = self.optimizer_shards == WITH_REPLICAS
        return Paper(job, Machine(kind, devices_per_host=hosts), cluster.devices, cluster.memory_bytes, shares)

    def _shards(self) -> int:
        """The fixed number; 1 if plans decide."""
        if self.optimizer_shards == WITH_REPLICAS:
            return 1
        if not self.optimizer_shards.isdecimal():
            raise ArgumentError(f"--optimizer-shards {self.optimizer_shards!r}: expected a number, or {WITH_REPLICAS}")
        return int(self.optimizer_shards)

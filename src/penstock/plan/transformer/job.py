"""How a transformer is trained, and the devices that it is trained on, besides the pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError, check_counts
from penstock.costs.hardware import DEFAULT_EFFICIENCY, DeviceSpec, Efficiency, Interconnect
from penstock.plan.transformer.model import TransformerConfig
from penstock.simulate import LinkCost

Recompute = Literal["none", "selective", "full"]
"""What the backward computes again: nothing, attention's scores and what follows from them, or each layer."""

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of each parameter in mixed precision with Adam: 16 bits; a sum in float32; a copy and two moments in float32."""


@accept_old_names(sequence="seq_length", fused_attention="flash_attention")
@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Training of a transformer in mixed precision on groups of devices that share each layer.

    Attributes:
        model: what is trained.
        seq_length: tokens of a row.
        tensor_parallel: t, the devices that divide each layer among them (Shoeybi et al. 2019).
        sequence_parallel: whether they also divide norms, dropouts and residuals by tokens (Korthikanti et al. 2022).
        recompute: what the backward computes again.
        flash_attention: whether one kernel computes attention and keeps no scores, as FlashAttention does.
        fused_loss: whether one kernel computes the loss and leaves the gradient in place of logits of 16 bits, as the
            cross entropy of TransformerEngine does; otherwise logits are kept in float32.
        dtype: of activations and products, with 2 bytes each.
        optimizer_shards: the replicas that divide the optimizer's state among them (ZeRO-1).

    Raises:
        ArgumentError: t does not divide heads, the feed-forward or the sequence, or a number is less than one.
    """

    model: TransformerConfig
    seq_length: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    flash_attention: bool = False
    fused_loss: bool = False
    dtype: str = "bfloat16"
    optimizer_shards: int = 1

    def __post_init__(self) -> None:
        shards = self.optimizer_shards
        check_counts(seq_length=self.seq_length, tensor_parallel=self.tensor_parallel, optimizer_shards=shards)
        if self.recompute not in ("none", "selective", "full"):
            raise ArgumentError(f"recompute={self.recompute!r}: expected 'none', 'selective' or 'full'")
        shared = {"num_attention_heads": self.model.num_attention_heads, "intermediate_size": self.model.inner}
        if self.sequence_parallel:
            shared["seq_length"] = self.seq_length
        for name, value in shared.items():
            if value % self.tensor_parallel:
                raise ArgumentError(
                    f"tensor_parallel={self.tensor_parallel} does not divide {name}={value}: every device needs an "
                    "equal part"
                )


LINK_FRACTION = 0.8
"""Of a cable's rate, what large collectives reach: round figures. (nccl-tests on eight A100: 230 of 300 GB/s.)"""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Hosts of equal devices.

    Attributes:
        device: each of them.
        efficiency: how much of its peaks is reached.
        network_fraction: how much of the rate of links between hosts.
        devices_per_host: how many a host has.

    Raises:
        ArgumentError: a fraction is not above 0 and at most 1.
    """

    device: DeviceSpec
    efficiency: Efficiency = DEFAULT_EFFICIENCY
    network_fraction: float = LINK_FRACTION
    devices_per_host: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.network_fraction <= 1:
            raise ArgumentError(
                f"network_fraction={self.network_fraction!r}: expected a fraction, above 0 and at most 1"
            )

    @property
    def link(self) -> LinkCost:
        """Between devices of a host, at the rate that is reached. Raises ArgumentError if there is none."""
        return self._effective_link(self.device.link, "within a host", LINK_FRACTION)

    @property
    def network(self) -> LinkCost:
        """Between devices of two hosts, a device's share, at the rate that is reached. Raises as `link` does."""
        return self._effective_link(self.device.network, "between hosts", self.network_fraction)

    def all_reduce_seconds(self, size: float, devices: int, *, stride: int = 1) -> float:
        """Return the seconds of an all-reduce of this many bytes over neighbors, or every stride-th device.

        Rings within hosts and, if the group has more of them, between hosts: there, a host's members together have
        their ports, of which each of the stride groups on the host uses its own.
        """
        if devices == 1:
            return 0.0
        in_host = min(devices, max(1, self.devices_per_host // stride))
        if in_host == devices:
            return _ring(size, devices, self.link)
        return max(
            _ring(size, in_host, self.link) if in_host > 1 else 0.0,
            _ring(size, devices, self.network, in_host),
        )

    def _effective_link(self, interconnect: Interconnect | None, location: str, fraction: float) -> LinkCost:
        if interconnect is None:
            raise ArgumentError(f"device {self.device.key!r}: its interconnect {location} is unknown")
        return LinkCost(interconnect.latency_seconds, interconnect.bytes_per_second * fraction)


def _ring(size: float, devices: int, link: LinkCost, ports: int = 1) -> float:
    rounds = 2 * math.ceil(math.log2(devices))  # latencies as of a tree, which libraries use where latencies count
    return rounds * link.latency_seconds + 2 * (devices - 1) / devices * size / (link.bytes_per_second * ports)

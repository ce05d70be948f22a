"""What `penstock plan` plans for: devices, by numbers or specifications (--device h100), and models on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from penstock._base.errors import ArgumentError
from penstock._base.formatting import format_bytes, pluralize
from penstock.cli._errors import flag
from penstock.cli._options import REQUIRED, check_count, options_on
from penstock.cli._target import parse_link_cost

if TYPE_CHECKING:
    from penstock.costs.hardware import DeviceSpec, Interconnect
    from penstock.plan import Cluster, DevicePool
    from penstock.plan.transformer.step import AnalyticJob
    from penstock.simulate import LinkCost

WITH_REPLICAS = "dp"
"""Value of --optimizer-shards: the number of replicas of the plan."""

_option, _on_paper = options_on("Devices"), options_on("Analytic transformer model")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The devices to plan for."""

    devices: str = _option(
        "Number of devices, or a count per device type: 4xold,8xnew.", "--devices", "-n", default=REQUIRED
    )
    memory: str | None = _option("Memory per device: 80GiB, or by type: old=40GiB,new=80GiB. Default: no limit.")
    speed: str | None = _option("Relative speed by type: old=0.5,new=1. Default: 1, the profile's device.")
    link: str | None = _option(
        'Link between two devices: "900gbit delay 3us", a rate and a latency as for tc. Default: what a profile '
        "measured (with --links), or a typical link of the device."
    )
    devices_per_host: int | None = _option("Devices per host; default: all on one host.")
    inter_host_link: str | None = _option("Link between hosts; default: as --link. Requires --devices-per-host.")
    offload_link: str | None = _option("Link to the host's memory and back; if set, stages may offload activations.")
    action_overhead: float | None = _option(
        "Seconds that the runtime adds to each forward and backward of a stage. Default: what a profile measured (on "
        "CPUs), or 0."
    )
    device: str | None = _option(
        "A name from `penstock devices`, such as h100: memory and links from its specifications, and times of TARGET "
        "estimated for it."
    )
    calibrate: list[Path] | None = _option(
        "Profile measured on such a device, of any model, to calibrate the estimates; repeatable.", metavar="FILE"
    )

    @property
    def kind(self) -> DeviceSpec | None:
        """The device of --device."""
        from penstock.costs.hardware import device

        if self.device is None and self.calibrate:
            raise ArgumentError("--calibrate has no effect without --device; pass a device, as in --device h100")
        return None if self.device is None else device(self.device)

    def links(self) -> tuple[LinkCost | None, int | None, LinkCost | None]:
        """Return the link between two devices, the devices per host, and the link between hosts: as passed, or else as
        specified for --device."""
        device, per_host = self.kind, self.devices_per_host
        link, inter_host_link = parse_link_cost(self.link), parse_link_cost(self.inter_host_link)
        if device is not None:
            total = sum(kind.devices for kind in self.kinds())
            joined = device.link.devices if device.link is not None else 0
            if per_host is None and link is None and 0 < joined < total:
                per_host = joined
            if link is None and total > 1:
                link = _specified(device.link, device, "devices of a host", "--link")
            if inter_host_link is None and per_host is not None and per_host < total:
                inter_host_link = _specified(device.network, device, "hosts", "--inter-host-link")
        if inter_host_link is not None and per_host is None:
            raise ArgumentError(f"--inter-host-link {self.inter_host_link!r} requires --devices-per-host; pass both")
        return link, per_host, inter_host_link

    @property
    def notes(self) -> list[str]:
        """One line on the devices, if --device was passed."""
        device, (link, per_host, inter_host_link) = self.kind, self.links()
        if device is None:
            return []
        size = self.memory or f"{device.memory_bytes:.0f}"
        parts = [device.name, f"memory {format_bytes(float(size)) if size.isdecimal() else size}"]
        if link is not None:
            parts.append(f"link {self.link or _text(link)}")
        if per_host is not None and inter_host_link is not None:
            between = self.inter_host_link or _text(inter_host_link)
            parts.append(f"{pluralize(per_host, 'device')} per host, {between} between hosts")
        return ["; ".join(parts)]

    def read(
        self, measured: LinkCost | None = None, action_seconds: float | None = None, update: float = 0.0
    ) -> Cluster:
        """Return the cluster. The arguments are defaults of options and specifications."""
        from penstock.plan import Cluster
        from penstock.simulate import NO_COST

        device, (link, per_host, inter_host_link) = self.kind, self.links()
        return Cluster(
            link=link or measured or NO_COST,
            devices_per_host=per_host,
            inter_host_link=inter_host_link,
            kinds=self.kinds(math.inf if device is None else round(device.memory_bytes)),
            offload_link=parse_link_cost(self.offload_link),
            action_seconds=(action_seconds or 0.0) if self.action_overhead is None else self.action_overhead,
            optimizer_byte_seconds=update,
        )

    def kinds(self, memory_bytes: float = math.inf) -> tuple[DevicePool, ...]:
        """Return the devices of each type, which have that much memory unless --memory is passed."""
        from penstock.network.quantities import parse_size
        from penstock.plan import DevicePool

        counts: dict[str, int] = {}
        for part in self.devices.split(","):
            match = re.fullmatch(r"\s*(-?\d+)(?:x([\w.-]+))?\s*", part)
            if match is None or (match[2] is None and "," in self.devices) or (match[2] or "") in counts:
                raise ArgumentError(
                    f"--devices {self.devices!r}: expected a number, or one per device type, as in 4xold,8xnew"
                )
            counts[match[2] or ""] = check_count("--devices", int(match[1]))
        sizes = _by_kind("--memory", self.memory, counts, parse_size, memory_bytes)
        speeds = _by_kind("--speed", self.speed, counts, _speed, 1.0)
        return tuple(DevicePool(name, number, sizes[name], speeds[name]) for name, number in counts.items())


def _by_kind(
    option: str, text: str | None, kinds: Mapping[str, int], read: Callable[[str], float], default: float
) -> dict[str, float]:
    """Return the value of an option per device type, from one for all or name=value for each."""
    if text is None or "=" not in text:
        return dict.fromkeys(kinds, default if text is None else read(text))
    values = dict(part.strip().partition("=")[::2] for part in text.split(","))
    expected = ",".join(f"{name or 'kind'}=..." for name in kinds)
    if unknown := sorted(values.keys() - kinds.keys()):
        names = ", ".join(map(repr, kinds)) if any(kinds) else "one type without a name"
        raise ArgumentError(f"{option} {text!r}: there is no {unknown[0]!r}, --devices has {names}; pass {expected}")
    if missing := [kind for kind in kinds if kind not in values]:
        raise ArgumentError(f"{option} {text!r}: {missing[0]!r} is missing; pass {expected}")
    return {kind: read(value) for kind, value in values.items()}


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(
            f"--speed: {text!r} is not a number; pass the speed relative to the profile's device"
        ) from None


def _specified(cable: Interconnect | None, device: DeviceSpec, between: str, option: str) -> LinkCost:
    from penstock.simulate import LinkCost

    if cable is None:
        raise ArgumentError(f"--device {device.key}: the link between {between} is unknown; pass {option}")
    return LinkCost(cable.latency_seconds, cable.bytes_per_second)


def _text(link: LinkCost) -> str:
    """Format a link as an option takes it."""
    return f"{link.bytes_per_second * 8e-9:.6g}gbit delay {link.latency_seconds * 1e6:.6g}us"


@dataclass(frozen=True, slots=True)
class TransformerOptions:
    """An analytic transformer model and its sharding."""

    transformer: str | None = _on_paper(
        "Analytic model instead of TARGET: a name (gpt3-175b, llama3-70b, llama3-405b) or numbers: "
        "layers=126,hidden=16384,heads=128,kv-heads=8,ffn=53248,vocabulary=128256,style=llama."
    )
    seq_length: int = _on_paper("Tokens per sample.", default=4096)
    tensor_parallel: int = _on_paper("Tensor-parallel size (with sequence parallelism).", default=1)
    optimizer_shards: str = _on_paper(
        "Replicas that share the optimizer state, as with ZeRO-1; dp: all of a plan.", default="1"
    )

    def check_unused(self) -> None:
        """Raise ArgumentError if an option has no effect without --transformer."""
        for option in fields(self):
            if (value := getattr(self, option.name)) != option.default:
                reason = "; layers of a measured model stay whole" if option.name == "tensor_parallel" else ""
                raise ArgumentError(f"{flag(option.name)} {value} requires --transformer{reason}; omit it")

    def read(self, cluster: ClusterOptions) -> AnalyticJob:
        """Return the job on these devices."""
        from penstock.plan.transformer import ClusterSpec, TrainingConfig, transformer
        from penstock.plan.transformer.step import AnalyticJob

        if cluster.link is not None or cluster.inter_host_link is not None:
            raise ArgumentError(
                "--link and --inter-host-link have no effect with --transformer, as --device sets the links; omit them"
            )
        model, device, tensor_parallel = transformer(str(self.transformer)), cluster.kind, self.tensor_parallel
        if device is None:
            raise ArgumentError("--transformer requires --device; pass one, as in --device h100")
        by_replicas = self.optimizer_shards == WITH_REPLICAS
        if not by_replicas and not self.optimizer_shards.isdecimal():
            raise ArgumentError(f"--optimizer-shards {self.optimizer_shards!r}: expected a number, or {WITH_REPLICAS}")
        shards = 1 if by_replicas else int(self.optimizer_shards)
        job = TrainingConfig(
            model, self.seq_length, tensor_parallel, tensor_parallel > 1, flash_attention=True, optimizer_shards=shards
        )
        kinds = cluster.kinds()
        devices = sum(kind.devices for kind in kinds)
        if devices % tensor_parallel:
            raise ArgumentError(
                f"--devices {devices} is not a multiple of --tensor-parallel {tensor_parallel}: pass "
                f"{max(1, devices // tensor_parallel) * tensor_parallel}"
            )
        hosts = cluster.devices_per_host or (device.link.devices if device.link else 1) or 1
        machine = ClusterSpec(device, devices_per_host=hosts)
        return AnalyticJob(job, machine, devices, max(kind.memory_bytes for kind in kinds), by_replicas)

"""What `penstock plan` plans for: devices, by options or specifications (--device h100), and models on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock._base.errors import ArgumentError
from penstock._base.words import counted, sized
from penstock.cli._as_typed import flag
from penstock.cli._options import REQUIRED, check_count, options_on
from penstock.cli._target import link_of

if TYPE_CHECKING:
    from penstock.costs.hardware import Cable, Device
    from penstock.plan import Cluster, Kind
    from penstock.plan.transformer.step import Paper
    from penstock.simulate import LinkCost

WITH_REPLICAS = "dp"
"""For --optimizer-shards: as many as a plan has replicas."""

_option, _on_paper = options_on("Devices"), options_on("A transformer on paper")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The devices to plan for."""

    devices: str = _option(
        "Number of devices, or a count for each kind: 4xold,8xnew.", "--devices", "-n", default=REQUIRED
    )
    memory: str | None = _option("What each has: 80GiB, or by kind, old=40GiB,new=80GiB. By default no limit.")
    speed: str | None = _option("How fast each kind is: old=0.5,new=1. By default 1: as the profile's device.")
    link: str | None = _option(
        'Between two devices: "900gbit delay 3us", a rate and a latency as for tc; by default what a profile '
        "measured (its --links), or as usual for the device."
    )
    per_host: int | None = _option("How many of them a host has; by default one host has all.")
    between_hosts: str | None = _option("The link between hosts; by default as --link. Needs --per-host.")
    host_link: str | None = _option("To the host's memory and back; if given, stages may offload activations.")
    action_seconds: float | None = _option(
        "What the runtime adds to each forward and backward of a stage; by default what a profile measured (on "
        "CPUs), or 0."
    )
    device: str | None = _option(
        "A name from `penstock devices`, such as h100: memory and links as its vendor says, and times of TARGET "
        "estimated for it."
    )
    calibrate: list[Path] | None = _option(
        "For these estimates: what was measured on such devices, of any model; repeat it.", metavar="FILE"
    )

    @property
    def kind(self) -> Device | None:
        """The device that was named."""
        from penstock.costs.hardware import device

        if self.device is None and self.calibrate:
            raise ArgumentError("--calibrate is for estimates: name what to estimate for, as in --device h100")
        return None if self.device is None else device(self.device)

    @property
    def specified(self) -> ClusterOptions:
        """The same with what the named device's specifications say in place of what was not given."""
        device = self.kind
        if device is None:
            return self
        link, per_host, between_hosts = self.link, self.per_host, self.between_hosts
        total = sum(kind.devices for kind in self.kinds())
        joined = device.link.devices if device.link is not None else 0
        if per_host is None and link is None and 0 < joined < total:
            per_host = joined
        if link is None and total > 1:
            link = _text(device.link, device, "two of a host", "--link")
        if between_hosts is None and per_host is not None and per_host < total:
            between_hosts = _text(device.network, device, "two of different hosts", "--between-hosts")
        memory = self.memory or f"{device.memory_bytes:.0f}"
        return replace(self, memory=memory, link=link, per_host=per_host, between_hosts=between_hosts)

    @property
    def said(self) -> list[str]:
        """What is planned for, in a line, if a device was named."""
        device, given = self.kind, self.specified
        if device is None:
            return []
        memory = sized(float(given.memory)) if given.memory and given.memory.isdecimal() else given.memory
        parts = [device.name, f"memory {memory}", *([f"link {given.link}"] if given.link else [])]
        if given.per_host is not None and given.between_hosts:
            parts.append(f"{counted(given.per_host, 'device')} a host, {given.between_hosts} between hosts")
        return ["; ".join(parts)]

    def read(
        self, measured: LinkCost | None = None, action_seconds: float | None = None, update: float = 0.0
    ) -> Cluster:
        """The cluster: with this link and these seconds, unless options or specifications say others."""
        from penstock.plan import Cluster
        from penstock.simulate import NO_COST

        given = self.specified
        if given.between_hosts is not None and given.per_host is None:
            raise ArgumentError(
                f"--between-hosts {given.between_hosts!r} needs --per-host: how many devices a host has"
            )
        return Cluster(
            link=link_of(given.link) or measured or NO_COST,
            devices_per_host=given.per_host,
            between_hosts=link_of(given.between_hosts),
            kinds=given.kinds(),
            host_link=link_of(given.host_link),
            action_seconds=(action_seconds or 0.0) if given.action_seconds is None else given.action_seconds,
            optimizer_byte_seconds=update,
        )

    def kinds(self) -> tuple[Kind, ...]:
        """The devices of each kind."""
        from penstock.network.quantities import size_of
        from penstock.plan import Kind

        counts: dict[str, int] = {}
        for part in self.devices.split(","):
            found = re.fullmatch(r"\s*(-?\d+)(?:x([\w.-]+))?\s*", part)
            if found is None or (found[2] is None and "," in self.devices) or (found[2] or "") in counts:
                raise ArgumentError(
                    f"--devices {self.devices!r}: expected a number, or numbers of several kinds, as in 4xold,8xnew"
                )
            counts[found[2] or ""] = check_count("--devices", int(found[1]))
        sizes = _by_kind("--memory", self.memory, counts, size_of, math.inf)
        speeds = _by_kind("--speed", self.speed, counts, _speed, 1.0)
        return tuple(Kind(name, number, sizes[name], speeds[name]) for name, number in counts.items())


def _by_kind(
    option: str, text: str | None, kinds: Mapping[str, int], read: Callable[[str], float], usual: float
) -> dict[str, float]:
    """What an option says of each kind: one for all, or name=value for each."""
    if text is None or "=" not in text:
        return dict.fromkeys(kinds, usual if text is None else read(text))
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    expected = ",".join(f"{name or 'kind'}=..." for name in kinds)
    if unknown := sorted(given.keys() - kinds.keys()):
        have = ", ".join(map(repr, kinds)) if any(kinds) else "one kind without a name"
        raise ArgumentError(f"{option} {text!r}: there is no {unknown[0]!r}, --devices has {have}; pass {expected}")
    if missing := [kind for kind in kinds if kind not in given]:
        raise ArgumentError(f"{option} {text!r} says nothing of {missing[0]!r}; pass {expected}")
    return {kind: read(value) for kind, value in given.items()}


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"--speed: {text!r} is not a number; 1 is as fast as the profile's device") from None


def _text(cable: Cable | None, device: Device, between: str, option: str) -> str:
    """A link as its option takes it."""
    if cable is None:
        raise ArgumentError(f"--device {device.key}: what {between} send each other is not known; pass {option}")
    return f"{cable.bytes_per_second * 8e-9:.6g}gbit delay {cable.latency_seconds * 1e6:.6g}us"


@dataclass(frozen=True, slots=True)
class TransformerOptions:
    """A transformer and how layers are shared among devices."""

    transformer: str | None = _on_paper(
        "Instead of TARGET: a name (gpt3-175b, llama3-70b, llama3-405b) or numbers: "
        "layers=126,hidden=16384,heads=128,kv-heads=8,ffn=53248,vocabulary=128256,style=llama."
    )
    sequence: int = _on_paper("Tokens of a row.", default=4096)
    tensor_parallel: int = _on_paper("Tensor-parallel size (with sequence parallelism).", default=1)
    optimizer_shards: str = _on_paper(
        "Replicas that share the optimizer's state, as with ZeRO-1; dp: all that a plan has.", default="1"
    )

    def check_unused(self) -> None:
        """Refuses what only a transformer on paper can be asked for."""
        for each in fields(self):
            if getattr(self, each.name) != each.default:
                given = f"{flag(each.name)} {getattr(self, each.name)} requires --transformer"
                whole = "; layers of a measured model stay whole" if each.name == "tensor_parallel" else ""
                raise ArgumentError(f"{given}{whole}; omit it")

    def read(self, cluster: ClusterOptions) -> Paper:
        """The job, on these devices."""
        from penstock.plan.transformer import Job, Machine, transformer
        from penstock.plan.transformer.step import Paper

        if cluster.link is not None or cluster.between_hosts is not None:
            raise ArgumentError("--link and --between-hosts are not for --transformer: the --device states its links")
        model, kind, shared = transformer(str(self.transformer)), cluster.kind, self.tensor_parallel
        if kind is None:
            raise ArgumentError("--transformer needs --device: what to estimate for, as in --device h100")
        shares = self.optimizer_shards == WITH_REPLICAS
        if not shares and not self.optimizer_shards.isdecimal():
            raise ArgumentError(f"--optimizer-shards {self.optimizer_shards!r}: expected a number, or {WITH_REPLICAS}")
        shards = 1 if shares else int(self.optimizer_shards)
        job = Job(model, self.sequence, shared, shared > 1, fused_attention=True, optimizer_shards=shards)
        kinds = cluster.kinds()
        devices = sum(one.devices for one in kinds)
        if devices % shared:
            raise ArgumentError(
                f"--devices {devices} is not a multiple of --tensor-parallel {shared}: pass "
                f"{max(1, devices // shared) * shared}"
            )
        hosts = cluster.per_host or (kind.link.devices if kind.link else 1) or 1
        machine = Machine(kind, devices_per_host=hosts)
        return Paper(job, machine, devices, max(one.memory_bytes for one in kinds), shares)

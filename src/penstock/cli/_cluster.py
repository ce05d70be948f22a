"""Options for the devices to plan for; `--device h100` in place of what is known of it: its memory and links."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock._base.errors import ArgumentError
from penstock._base.words import counted, sized
from penstock.cli._options import check_count, options_on
from penstock.cli._target import link_of

if TYPE_CHECKING:
    from penstock.costs import Profile
    from penstock.costs.hardware import Cable, Device
    from penstock.plan import Cluster, Kind
    from penstock.simulate import LinkCost


_option = options_on("Devices")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The devices to plan for."""

    devices: Annotated[str, _option("Number of devices, or a count for each kind: 4xold,8xnew.", "--devices", "-n")]
    memory: Annotated[
        str | None, _option("What each has: 80GiB, or by kind, old=40GiB,new=80GiB. By default no limit.")
    ] = None
    speed: Annotated[
        str | None, _option("How fast each kind is: old=0.5,new=1. By default 1: as the profile's device.")
    ] = None
    link: Annotated[
        str | None,
        _option(
            'Between two devices: "900gbit delay 3us", a rate and a latency as for tc; by default what a profile '
            "measured (its --links), or as usual for the device."
        ),
    ] = None
    per_host: Annotated[int | None, _option("How many of them a host has; by default one host has all.")] = None
    between_hosts: Annotated[str | None, _option("The link between hosts; by default as --link. Needs --per-host.")] = (
        None
    )
    host_link: Annotated[
        str | None, _option("To the host's memory and back; if given, stages may offload activations.")
    ] = None
    action_seconds: Annotated[
        float | None,
        _option(
            "What the runtime adds to each forward and backward of a stage; by default what a profile measured (on "
            "CPUs), or 0."
        ),
    ] = None
    device: Annotated[
        str | None,
        _option(
            "A name from `penstock devices`, such as h100: memory and links as its vendor says, and times of TARGET "
            "estimated for it."
        ),
    ] = None
    calibrate: Annotated[
        list[Path] | None,
        _option("For these estimates: what was measured on such devices, of any model; repeat it.", metavar="FILE"),
    ] = None

    @property
    def kind(self) -> Device | None:
        """The device that was named."""
        from penstock.costs.hardware import device

        if self.device is None and self.calibrate:
            raise ArgumentError("--calibrate is for estimates: name what to estimate for, as in --device h100")
        return None if self.device is None else device(self.device)

    @property
    def specified(self) -> ClusterOptions:
        """The same with what the named device's specifications say in place of what was not given. Raises
        ArgumentError: a link is needed that they do not state."""
        device = self.kind
        if device is None:
            return self
        link, per_host, between_hosts = self.link, self.per_host, self.between_hosts
        total = sum(int(number) for number in re.findall(r"(?:^|,)\s*(\d+)", self.devices))
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
        """The cluster. Raises ArgumentError if an option is wrong.

        Args:
            measured: the link, unless --link says it.
            action_seconds: unless --action-seconds says it.
            update: `Cluster.optimizer_byte_seconds`.
        """
        from penstock.plan import Cluster
        from penstock.simulate import NO_COST

        if self.between_hosts is not None and self.per_host is None:
            raise ArgumentError(f"--between-hosts {self.between_hosts!r} needs --per-host: how many devices a host has")
        return Cluster(
            link=link_of(self.link) or measured or NO_COST,
            devices_per_host=self.per_host,
            between_hosts=link_of(self.between_hosts),
            kinds=self._kinds(),
            host_link=link_of(self.host_link),
            action_seconds=(action_seconds or 0.0) if self.action_seconds is None else self.action_seconds,
            optimizer_byte_seconds=update,
        )

    def _kinds(self) -> tuple[Kind, ...]:
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
        sizes = _by_kind("--memory", self.memory, counts)
        speeds = _by_kind("--speed", self.speed, counts)
        return tuple(
            Kind(
                name,
                number,
                math.inf if sizes[name] is None else size_of(sizes[name]),
                1.0 if speeds[name] is None else _speed(speeds[name]),
            )
            for name, number in counts.items()
        )


def _by_kind(option: str, text: str | None, kinds: Collection[str]) -> dict[str, Any]:
    """What an option says of each kind: one for all, or name=value for each."""
    if text is None or "=" not in text:
        return dict.fromkeys(kinds, text)
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    expected = ",".join(f"{name or 'kind'}=..." for name in kinds)
    if unknown := sorted(given.keys() - {*kinds}):
        have = ", ".join(map(repr, kinds)) if any(kinds) else "one kind without a name"
        raise ArgumentError(f"{option} {text!r}: there is no {unknown[0]!r}, --devices has {have}; pass {expected}")
    if missing := [kind for kind in kinds if kind not in given]:
        raise ArgumentError(f"{option} {text!r} says nothing of {missing[0]!r}; pass {expected}")
    return given


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"--speed: {text!r} is not a number; 1 is as fast as the profile's device") from None


def check_of(profiles: Sequence[Profile], device: Device) -> None:
    """Refuses profiles of another type of device. Raises ArgumentError."""
    for profile in profiles:
        if profile.device != device.type:
            raise ArgumentError(
                f"--device {device.key}: the profile is of {profile.device_name or profile.device} ({profile.device}), "
                f"not of {device.name} ({device.type}); estimate one: penstock profile TARGET --device {device.key}"
            )


def cautions(profiles: Sequence[Profile]) -> list[str]:
    """What to say of profiles that were not measured, or not on a quiet machine."""
    from penstock.costs.sizes import doubts

    own = (note for one in profiles for note in one.notes)
    return list(dict.fromkeys((*own, *(note for one in profiles for note in doubts(one)))))


def _text(cable: Cable | None, device: Device, between: str, option: str) -> str:
    """A link as its option takes it."""
    if cable is None:
        raise ArgumentError(f"--device {device.key}: what {between} send each other is not known; pass {option}")
    return f"{cable.bytes_per_second * 8e-9:.6g}gbit delay {cable.latency_seconds * 1e6:.6g}us"

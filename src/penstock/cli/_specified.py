"""`--device h100` in place of what is known of it: its memory, and the links between such devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ArgumentError
from penstock.words import counted, sized

if TYPE_CHECKING:
    from penstock.balance import Profile
    from penstock.hardware import Cable, Device


def filled(
    device: Device,
    devices: int | str,
    memory: str | None,
    link: str | None,
    per_host: int | None,
    between_hosts: str | None,
) -> dict[str, Any]:
    """The options of a cluster of such devices; those that were not given are as its specifications say.

    Raises:
        ArgumentError: a link is needed that they do not state.
    """
    total = sum(int(number) for number in re.findall(r"(?:^|,)\s*(\d+)", str(devices)))
    joined = device.link.devices if device.link is not None else 0
    if per_host is None and link is None and 0 < joined < total:
        per_host = joined
    if link is None and total > 1:
        link = _text(device.link, device, "two of a host", "--link")
    if between_hosts is None and per_host is not None and per_host < total:
        between_hosts = _text(device.network, device, "two of different hosts", "--between-hosts")
    memory = memory or f"{device.memory_bytes:.0f}"
    return {"memory": memory, "link": link, "per_host": per_host, "between_hosts": between_hosts}


def described(device: Device, options: dict[str, Any]) -> str:
    """What is planned for, in a line."""
    link, per_host, between_hosts = (options[name] for name in ("link", "per_host", "between_hosts"))
    memory = sized(float(options["memory"])) if options["memory"].isdecimal() else options["memory"]
    parts = [device.name, f"memory {memory}", *([f"link {link}"] if link else [])]
    if between_hosts:
        parts.append(f"{counted(per_host, 'device')} a host, {between_hosts} between hosts")
    return "; ".join(parts)


def check_of(profiles: Sequence[Profile], device: Device) -> None:
    """Refuses profiles of another type of device. Raises ArgumentError."""
    for profile in profiles:
        if profile.device != device.type:
            raise ArgumentError(
                f"--device {device.key}: the profile is of {profile.device_name or profile.device} ({profile.device}), "
                f"not of {device.name} ({device.type}); estimate one: penstock profile TARGET --device {device.key}"
            )


def cautions(profiles: Sequence[Profile]) -> list[str]:
    """What to say of profiles that were not measured."""
    return list(dict.fromkeys(note for one in profiles if one.source == "estimate" for note in one.notes))


def _text(cable: Cable | None, device: Device, between: str, option: str) -> str:
    """A link as its option takes it."""
    if cable is None:
        raise ArgumentError(f"--device {device.key}: what {between} send each other is not known; give {option}")
    return f"{cable.bytes_per_second * 8e-9:.6g}gbit delay {cable.latency_seconds * 1e6:.6g}us"

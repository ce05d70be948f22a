"""What a device can do at most, as its vendor states it; those that are known are in `devices.toml`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock._base.aliases import accept_old_names
from penstock._base.errors import ArgumentError
from penstock._base.files import MAX_QUOTED, quoted, read_toml
from penstock._base.formatting import did_you_mean, printable_line

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
"""Those for which a device may have a peak. "tf32" is float32 with products of reduced precision."""

LINK_LATENCY_SECONDS = 5e-6
NETWORK_LATENCY_SECONDS = 10e-6
"""What a message takes besides its bytes, within a host and between hosts: the order of magnitude of small messages in
the libraries' own tests. Vendors state none, and sizes that stages exchange hardly depend on it."""


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What joins two devices.

    Attributes:
        name: what the vendor calls it.
        bytes_per_second: from one of them to the other.
        latency_seconds: of a message, besides its bytes.
        devices: how many it joins, each with each; 0: any number.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    devices: int = 0


@accept_old_names(reports="reported_names")
@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device.

    Attributes:
        key: by which it is found ("h100-sxm").
        name: what its vendor calls it.
        flops_per_second: the dense peak of matrix products, by dtype.
        memory_bytes, bytes_per_second: of its memory.
        link: to another device of its host; None: not known.
        network: to a device of another host, its share of a typical host's ports; None: not known.
        sources: where these figures are from.
        aliases: other names by which it is found.
        reported_names: what it calls itself begins with one of these.
        type: the type of torch's device ("cuda").
        processors: streaming multiprocessors, among which products are divided; 0: not known.

    Raises:
        ArgumentError: a figure is not a number above 0, or a dtype is unknown.
    """

    key: str
    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: float
    bytes_per_second: float
    link: Interconnect | None = None
    network: Interconnect | None = None
    sources: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    reported_names: tuple[str, ...] = field(default=(), repr=False)
    type: str = "cuda"
    processors: int = 0

    def __post_init__(self) -> None:
        if unknown := [dtype for dtype in self.flops_per_second if dtype not in DTYPES]:
            raise ArgumentError(
                f"device {self.key!r}: unknown dtype {quoted(unknown[0])}; expected {', '.join(DTYPES)}"
            )
        quantities = {f"peak for {dtype}": value for dtype, value in self.flops_per_second.items()}
        quantities |= {"memory": self.memory_bytes, "bandwidth": self.bytes_per_second}
        quantities |= {link.name: link.bytes_per_second for link in (self.link, self.network) if link is not None}
        for name, value in quantities.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ArgumentError(f"device {self.key!r}: {name}: {quoted(value)}; expected a number above 0")

    def peak(self, dtype: str) -> float:
        """Return the operations per second of matrix products in this dtype; "tf32" is float32 on a device without it.

        Raises:
            ArgumentError: the vendor states none; names the dtypes that have one.
        """
        name = "float8" if dtype.startswith("float8") else dtype
        if name == "tf32" and name not in self.flops_per_second:
            name = "float32"
        if name not in self.flops_per_second:
            raise ArgumentError(
                f"device {self.key!r} has no stated peak for products in {dtype}; it has for "
                f"{', '.join(self.flops_per_second)}"
            )
        return self.flops_per_second[name]


@functools.cache
def devices() -> Mapping[str, DeviceSpec]:
    """Return all known devices, by key."""
    return _read(Path(__file__).with_name("devices.toml"))


def device(name: str | Path) -> DeviceSpec:
    """Return the device with this key, alias or reported name; or the one that a file in the format of `devices.toml`
    describes.

    Raises:
        ArgumentError: no device has that name (the message names those most like it), or the file is not as expected.
    """
    text = str(name)
    if text.endswith(".toml"):
        specs = list(_read(Path(text)).values())
        if len(specs) != 1:
            raise ArgumentError(f"{text}: expected one device, with a table for it, not {len(specs)}")
        return specs[0]
    names = {alias: spec for spec in devices().values() for alias in (spec.key, *spec.aliases)}
    key = text.lower().replace("_", "-").replace(" ", "-")
    if key in names:
        return names[key]
    if (reported := device_by_reported_name(text)) is not None:
        return reported
    raise ArgumentError(
        f"device {text!r}: not known; {did_you_mean(key, names, 0.5)}"
        "`penstock devices` lists the known ones; for another, pass a .toml file in the format of devices.toml"
    )


def device_by_reported_name(name: str) -> DeviceSpec | None:
    """Return the device with this reported name, as in `torch.cuda.get_device_name()`; None if it is unknown."""
    matches = [
        (len(prefix), spec) for spec in devices().values() for prefix in spec.reported_names if name.startswith(prefix)
    ]
    return max(matches, key=lambda pair: pair[0])[1] if matches else None


def _read(path: Path) -> dict[str, DeviceSpec]:
    tables = read_toml(path).items()
    return {key: _parse_device(key, table, f"{path}: {printable_line(key, MAX_QUOTED)}") for key, table in tables}


_KEYS = (
    "name", "tflops", "memory_gb", "bandwidth_gbps", "link", "network", "sources", "aliases", "reports", "type",
    "processors",
)  # fmt: skip


def _parse_device(key: str, table: Any, location: str) -> DeviceSpec:
    try:
        if unknown := [name for name in table if name not in _KEYS]:
            raise ArgumentError(f"{location}: {quoted(unknown[0])} is unknown; expected {', '.join(_KEYS)}")
        return DeviceSpec(
            key,
            str(table.get("name", key)),
            {dtype: 1e12 * value for dtype, value in table["tflops"].items()},
            1e9 * table["memory_gb"],
            1e9 * table["bandwidth_gbps"],
            _parse_interconnect(table.get("link"), LINK_LATENCY_SECONDS),
            _parse_interconnect(table.get("network"), NETWORK_LATENCY_SECONDS),
            tuple(table.get("sources", ())),
            tuple(table.get("aliases", ())),
            tuple(table.get("reports", ())),
            str(table.get("type", "cuda")),
            int(table.get("processors", 0)),
        )
    except ArgumentError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        missing = (
            f"{error} is missing" if isinstance(error, KeyError) else f"a value has the wrong type or size ({error})"
        )
        raise ArgumentError(f"{location}: {missing}; see penstock/costs/hardware/devices.toml") from error


def _parse_interconnect(table: Any, latency_seconds: float) -> Interconnect | None:
    if table is None:
        return None
    latency = 1e-6 * table["latency_us"] if "latency_us" in table else latency_seconds
    return Interconnect(str(table.get("name", "")), 1e9 * table["gbps"], latency, int(table.get("devices", 0)))

"""Choose what makes a network behave as requested, the kernel's tbf or a user-space switch, or refuse.

tbf     rates only
switch  everything, as fast as a processor can forward frames
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import time
from dataclasses import dataclass, replace

from penstock._base.errors import ArgumentError, FabricError
from penstock.network.namespaces import within
from penstock.network.reaper import tool
from penstock.network.switch.tap import DEVICE, open_tap
from penstock.network.topology import Topology

AUTO = "auto"
SHAPERS = (AUTO, "tbf", "switch")
LARGE_MTU = 9000

WRITES_PER_FRAME = 6.0
"""Forwarding a TCP frame takes as long as this many writes of a frame that nobody receives.

benchmarks/switch measures it.
"""
FRAMES_PER_DATA_FRAME = 1.5
"""Frames per data frame: TCP acknowledges every second one."""
_PROBES, _PROBE_FRAMES = 5, 400


@dataclass(frozen=True, slots=True)
class Shaper:
    """How a network is implemented.

    Attributes:
        name: "tbf" or "switch".
        topology: the requested one, with the mtu that it needs.
        remarks: what a reader of the results must know.
    """

    name: str
    topology: Topology
    remarks: tuple[str, ...] = ()


def choose(topology: Topology, hosts: int, requested: str = AUTO, only_switch: str | None = None) -> Shaper:
    """Choose what shapes a network on this machine, which can create hosts: the requested one, if it can.

    `only_switch` says what else was requested that only the switch can do. Raises ArgumentError: the requested shaper
    cannot do what was requested, or not at this rate. Raises FabricError: no switch can run here. In either case,
    nothing has been created.
    """
    if requested not in SHAPERS:
        raise ArgumentError(f"there is no shaper {requested!r}: pass one of {', '.join(SHAPERS)}")
    beyond_tbf = only_switch or (None if topology.is_plain else f"tbf limits only the rate: {topology.link}")
    if requested == "tbf" or (requested == AUTO and beyond_tbf is None):
        if beyond_tbf is not None:
            raise ArgumentError(f"{beyond_tbf}; omit --shaper, or pass --shaper switch")
        return Shaper("tbf", topology)
    if (no_switch := why_no_switch()) is not None:
        raise FabricError(no_switch)
    shaper = _fit_mtu(topology, hosts)
    links = [end for link in topology.links for end in (link, link.down) if end is not None]
    if not any(link.impairment.jitter_seconds and not link.impairment.overtaking for link in links):
        return shaper
    remark = (
        "frames keep their order, so under load jitter turns into delay: a late frame holds up those behind it (with "
        "the word overtaking they pass it, which TCP mistakes for loss)"
    )
    return replace(shaper, remarks=(*shaper.remarks, remark))


def _fit_mtu(topology: Topology, hosts: int) -> Shaper:
    """Make frames large enough for the switch to forward everything that the hosts can send."""
    needed, capacity = needed_frames_per_second(topology, hosts), frames_per_second(topology.link.frame_bytes)
    if needed <= capacity:
        return Shaper("switch", topology)
    larger = topology.with_mtu(max(topology.mtu, LARGE_MTU))
    larger_needed, larger_capacity = needed_frames_per_second(larger, hosts), frames_per_second(larger.link.frame_bytes)
    is_given = any(link.mtu_is_given for link in topology.links)
    if not is_given and larger_needed <= larger_capacity:
        remark = (
            f"frames carry {larger.mtu} bytes: with {topology.mtu}, all hosts together could send {needed:,.0f} a "
            f"second, acknowledgements included, but the switch forwards only about {capacity:,.0f} here "
            f"(pass mtu {topology.mtu} in the link to keep frames small)"
        )
        return Shaper("switch", larger, (remark,))
    best, needed, capacity = (topology, needed, capacity) if is_given else (larger, larger_needed, larger_capacity)
    share = capacity / needed
    advice = f"at most {math.floor(share * 100)}% of it"
    if len({link.bytes_per_second for link in topology.links}) == 1 and topology.link.down is None:
        advice = f"a rate of at most {math.floor(share * topology.link.bytes_per_second * 8 / 1e6):,}mbit"
    raise ArgumentError(
        f"{hosts} hosts with {topology.link} can send {needed:,.0f} frames of {best.mtu} bytes a second, "
        f"acknowledgements included, but the switch forwards only about {capacity:,.0f} here: pass {advice}"
        + (", fewer hosts" if hosts > 2 else "")
        + (f", or mtu {LARGE_MTU}" if is_given and larger_needed <= larger_capacity else "")
    )


def needed_frames_per_second(topology: Topology, hosts: int) -> float:
    """Return the frames per second if every host sends at its rate."""
    down = [topology.down(host).bytes_per_second for host in range(hosts)]
    limits = [sum(down[:host] + down[host + 1 :]) for host in range(hosts)]  # what they can receive from this one
    rates = [min(topology.up(host).bytes_per_second, limits[host]) for host in range(hosts)]
    return FRAMES_PER_DATA_FRAME * sum(rates) / topology.up(0).frame_bytes


def frames_per_second(frame_bytes: int) -> float:
    """Measure roughly how many TCP frames per second a switch forwards here, in a temporary namespace: the best of
    several tries to write frames to a device."""

    def write_seconds() -> float:
        descriptor = open_tap("probe", None)
        try:
            mtu = str(frame_bytes - 14)
            subprocess.run([tool("ip"), "link", "set", "probe", "mtu", mtu, "up"], check=True, capture_output=True)
            frame = bytes(12) + b"\x88\xb5" + bytes(frame_bytes - 14)  # an experimental EtherType: nobody receives it
            best = float("inf")
            for _ in range(_PROBES):
                began = time.thread_time()  # not wall time: the switch has priority over others
                for _ in range(_PROBE_FRAMES):
                    os.write(descriptor, frame)
                best = min(best, (time.thread_time() - began) / _PROBE_FRAMES)
            return best
        finally:
            os.close(descriptor)

    return 1 / (WRITES_PER_FRAME * within(None, write_seconds))


def why_no_switch() -> str | None:
    """Explain why no switch can run here, and what to do about it; None if one can."""
    for package in ("numba", "scipy"):
        if importlib.util.find_spec(package) is None:
            return f"the switch for delay, jitter and loss needs {package}: `pip install 'penstock[fabric]'`"
    try:
        os.close(within(None, lambda: open_tap("probe", None)))
    except OSError as error:
        return (
            f"the switch for delay, jitter and loss needs TAP devices, but {DEVICE} cannot be used ({error.strerror}): "
            "`modprobe tun`, a kernel with CONFIG_TUN, or a container with --device /dev/net/tun and --privileged"
        )
    return None

"""What makes a network behave as asked: the kernel's tbf, or a switch in user space. Chosen or refused here.

tbf     rates alone
switch  everything, as fast as a processor can pass frames on
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
from dataclasses import dataclass, replace

from penstock.errors import ArgumentError, FabricError
from penstock.network.checks import why_not
from penstock.network.inside import within
from penstock.network.keeper import tool
from penstock.network.switch.tap import DEVICE, open_tap
from penstock.network.topology import Topology

AUTO = "auto"
SHAPERS = (AUTO, "tbf", "switch")
LARGE_MTU = 9000

WRITES_A_FRAME = 6.0
"""A TCP frame through the switch takes as long as this many writes of a frame that nothing receives.

benchmarks/switch measures it.
"""
ACKNOWLEDGED = 1.5
"""Frames for each that carries data: TCP acknowledges every second one."""
_PROBES, _PROBE_FRAMES = 5, 400


@dataclass(frozen=True, slots=True)
class Shaper:
    """How a network is implemented.

    Attributes:
        name: "tbf" or "switch".
        topology: with the mtu that it needs.
        remarks: what a reader of the results must know.
    """

    name: str
    topology: Topology
    remarks: tuple[str, ...] = ()


def choose(topology: Topology, hosts: int, wanted: str = AUTO, only_switch: str | None = None) -> Shaper:
    """Chooses what shapes a network here.

    Args:
        topology: what is asked for.
        hosts: how many.
        wanted: one of `SHAPERS`.
        only_switch: what else is asked for that only the switch can do, or None.

    Raises:
        ArgumentError: what is wanted cannot do what is asked for, or not at this rate.
        FabricError: nothing on this machine can. In either case nothing has been created yet.
    """
    if wanted not in SHAPERS:
        raise ArgumentError(f"there is no shaper {wanted!r}: give one of {', '.join(SHAPERS)}")
    missing = why_not()
    if missing is not None:
        raise FabricError(missing)
    beyond_tbf = only_switch or (None if topology.is_plain else f"tbf keeps a rate and nothing else: {topology.link}")
    if wanted == "tbf" or (wanted == AUTO and beyond_tbf is None):
        if beyond_tbf is not None:
            raise ArgumentError(f"{beyond_tbf}; leave --shaper out, or give --shaper switch")
        return Shaper("tbf", topology)
    no_switch = why_no_switch()
    if no_switch is not None:
        raise FabricError(no_switch)
    return _told_of_jitter(_fitted(topology, hosts))


def _told_of_jitter(shaper: Shaper) -> Shaper:
    """With the remark that whoever chooses jitter needs."""
    links = [one for link in shaper.topology.links for one in (link, link.down) if one is not None]
    if not any(link.impairment.jitter_seconds and not link.impairment.overtaking for link in links):
        return shaper
    said = (
        "frames keep their order, so that under load jitter turns into delay: one that is late holds up those behind "
        "it (with the word overtaking they pass it, which TCP takes for loss)"
    )
    return replace(shaper, remarks=(*shaper.remarks, said))


def _fitted(topology: Topology, hosts: int) -> Shaper:
    """With frames large enough that the switch can carry what the hosts can send."""
    needed, carried = _frames(topology, hosts)
    if needed <= carried:
        return Shaper("switch", topology)
    larger = topology.with_mtu(max(topology.mtu, LARGE_MTU))
    needed_then, carried_then = _frames(larger, hosts)
    is_given = any(link.mtu_is_given for link in topology.links)
    if not is_given and needed_then <= carried_then:
        said = (
            f"frames carry {larger.mtu} bytes: with {topology.mtu} all hosts together could send {needed:,.0f} a "
            f"second with their acknowledgements, and the switch passes on about {carried:,.0f} here "
            f"(mtu {topology.mtu} in the link's text keeps them small)"
        )
        return Shaper("switch", larger, (said,))
    best, needed, carried = (topology, needed, carried) if is_given else (larger, needed_then, carried_then)
    share = carried / needed
    uniform = len({link.bytes_per_second for link in topology.links}) == 1 and topology.link.down is None
    less = f"a rate of {share * topology.link.bytes_per_second * 8 / 1e6:,.0f}mbit" if uniform else f"{share:.0%} of it"
    raise ArgumentError(
        f"{hosts} hosts with {topology.link} can send {needed:,.0f} frames of {best.mtu} bytes a second, "
        f"acknowledgements included, but the switch passes on about {carried:,.0f} here: give {less} at most"
        + (", fewer hosts" if hosts > 2 else "")
        + (f", or mtu {LARGE_MTU}" if is_given and needed_then <= carried_then else "")
    )


def _frames(topology: Topology, hosts: int) -> tuple[float, float]:
    """Per second: what the hosts can send, and what the switch carries."""
    return needed_frames_per_second(topology, hosts), frames_per_second(topology.link.frame_bytes)


def needed_frames_per_second(topology: Topology, hosts: int) -> float:
    """With every host sending at its rate."""
    rates = [min(topology.up(host).bytes_per_second, _into(topology, host, hosts)) for host in range(hosts)]
    return ACKNOWLEDGED * sum(rates) / topology.up(0).frame_bytes


def _into(topology: Topology, host: int, hosts: int) -> float:
    """What all others can take of what a host sends."""
    return sum(topology.down(other).bytes_per_second for other in range(hosts) if other != host)


def frames_per_second(frame_bytes: int) -> float:
    """About how many TCP frames a switch passes on here: measured, in a namespace that vanishes."""
    return 1 / (WRITES_A_FRAME * within(None, lambda: _write_seconds(frame_bytes)))


def _write_seconds(frame_bytes: int) -> float:
    """Of one frame, to a device in the namespace of the calling thread: the best of some tries."""
    descriptor = open_tap("probe", None)
    try:
        mtu = str(frame_bytes - 14)
        subprocess.run([tool("ip") or "ip", "link", "set", "probe", "mtu", mtu, "up"], check=True, capture_output=True)
        frame = bytes(12) + b"\x88\xb5" + bytes(frame_bytes - 14)  # of a kind for experiments, which nobody receives
        best = float("inf")
        for _ in range(_PROBES):
            began = time.thread_time()  # others may have the processor now: the switch goes before them
            for _ in range(_PROBE_FRAMES):
                os.write(descriptor, frame)
            best = min(best, (time.thread_time() - began) / _PROBE_FRAMES)
        return best
    finally:
        os.close(descriptor)


def why_no_switch() -> str | None:
    """Why no switch can run here, and what to do about it; None if one can."""
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
